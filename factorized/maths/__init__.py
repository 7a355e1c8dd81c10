"""Tensors in, tensors out: the mathematics of factorized layers, free of modules and models."""
