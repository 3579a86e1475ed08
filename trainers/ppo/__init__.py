"""PPO with a critic, built on TRL's GRPO trainer."""
