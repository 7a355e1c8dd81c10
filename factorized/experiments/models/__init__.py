"""The image models of the paper."""
