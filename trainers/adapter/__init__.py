"""Translates between a TRL trainer and the engine: settings, precision, seeds, ranks."""
