"""PPO with a critic, on TRL's GRPO trainer."""
