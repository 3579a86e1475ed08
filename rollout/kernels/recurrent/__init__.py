"""Kernels of recurrent layers, whose state takes in one token after the other."""
