"""The twin: a second module tree over the trainer's weights."""
