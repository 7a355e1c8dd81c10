"""Convolutions that normalize their input by GPU kernels."""
