"""Models in files: save, load, dense checkpoints, transformers' folders."""
