"""Benchmarks that a user can run: speed and memory, beside dense models and other packages."""
