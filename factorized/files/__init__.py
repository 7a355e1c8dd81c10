"""Models in files: save, load, dense checkpoints and transformers folders."""
