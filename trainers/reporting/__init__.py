"""Reports rollouts in the trainer's logs, terminal and output folder."""
