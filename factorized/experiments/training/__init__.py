"""Image models, their data and their training loop."""
