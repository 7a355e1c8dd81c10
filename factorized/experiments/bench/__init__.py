"""Benchmarks that a user can run: how fast, how large, and what other packages take."""
