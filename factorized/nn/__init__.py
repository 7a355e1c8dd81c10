"""Modules that hold the cores of a format: one for each dense layer."""
