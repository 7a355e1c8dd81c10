"""Which layers of a model are factorized, at which ranks, and what that costs. Nothing here changes a model."""
