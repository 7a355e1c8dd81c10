"""Rewiring models: factorize, compose, lower, heads of other sizes; all planned layers or none."""
