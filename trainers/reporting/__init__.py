"""What a rollout adds to the trainer's logs, terminal and output folder."""
