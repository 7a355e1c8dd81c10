"""Compressing a trained network: plan, calibrate, factorize, recover, save, and a page about it."""
