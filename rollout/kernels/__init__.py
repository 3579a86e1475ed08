"""Triton kernels, each beside the plain-torch function that defines it."""
