"""From a factorized model to plain PyTorch, and to files."""
