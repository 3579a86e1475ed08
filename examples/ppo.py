"""Trains with PPO and a critic. The rollouts come from the model that is being trained.

    python examples/ppo.py --config examples/demo_ppo.yaml         # a small model on a CPU
    accelerate launch examples/ppo.py --model Qwen/Qwen3-0.6B \
        --dataset trl-lib/DeepMath-103K --max_completion_length 4096 --learning_rate 1e-6

Takes all arguments of `grpo.py` and of RolloutPPOConfig.
"""

from grpo import main

from trainers import PPOTrainer, RolloutPPOConfig

if __name__ == "__main__":
    main(PPOTrainer, RolloutPPOConfig)
