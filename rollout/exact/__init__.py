"""What `on_policy='exact'` changes, in the twin and in the trainer's model."""
