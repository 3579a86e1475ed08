"""PPO with rollouts from the model that is being trained, and a critic beside it.

    python examples/ppo.py --config examples/demo_ppo.yaml         # a small model on a CPU
    accelerate launch examples/ppo.py --model Qwen/Qwen3-0.6B \
        --dataset trl-lib/DeepMath-103K --max_completion_length 4096 --learning_rate 1e-6

Takes what `grpo.py` takes, and every argument of RolloutPPOConfig.
"""

from grpo import main

from trainers import PPOTrainer, RolloutPPOConfig

if __name__ == "__main__":
    main(PPOTrainer, RolloutPPOConfig)
