"""Thin adapters to other people's packages, each imported only where it is used."""
