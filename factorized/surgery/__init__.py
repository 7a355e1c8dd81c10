"""Changing models: factorize, truncate, compose, lower, and resize heads; all planned layers or none."""
