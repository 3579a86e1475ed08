"""Decides which sequences run next and which KV pages they hold; imports no torch."""
