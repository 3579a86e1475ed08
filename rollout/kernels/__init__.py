"""What a step computes besides the model; each kernel beside plain torch that defines it."""

SPLIT_TOKENS = 2048
"""Tokens of a row's context that one decode program attends over."""
