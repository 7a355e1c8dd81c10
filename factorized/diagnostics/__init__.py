"""Looking at products while they train: norms, effective step sizes, generalization terms."""
