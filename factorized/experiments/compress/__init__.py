"""Compress a trained network: plan, calibrate, factorize, recover, save, and write a page about it."""
