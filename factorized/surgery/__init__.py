"""Rewiring models: factorize, truncate, compose, lower, heads of other sizes; all planned layers or none."""
