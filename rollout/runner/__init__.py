"""Runs the scheduler's batches on the device: streams, slots, graphs, sampling."""
