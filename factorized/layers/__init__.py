"""Modules that hold factors, and the surgery that puts them into a model."""
