"""GPU memory that is taken for a rollout and given back to the trainer."""
