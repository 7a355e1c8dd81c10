"""Train neural networks whose weights are products."""
