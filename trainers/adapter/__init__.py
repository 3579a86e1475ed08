"""Fits the engine to a TRL trainer: settings, precision, seeds, ranks."""
