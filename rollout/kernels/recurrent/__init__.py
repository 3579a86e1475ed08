"""Layers whose state is fed one token after the other, over lanes of states."""
