"""Recipes: everything that decides a run, as checked data."""
