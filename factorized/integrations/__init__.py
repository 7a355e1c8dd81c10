"""Thin adapters to other packages, each imported only where it is used."""
