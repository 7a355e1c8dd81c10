"""Regularizing products: the forms of a model, and decay that acts on them."""
