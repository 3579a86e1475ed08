"""GPU memory that a rollout allocates and releases to the trainer afterwards."""
