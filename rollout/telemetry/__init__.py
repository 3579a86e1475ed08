"""Counts and times of a rollout; nothing here decides anything."""
