"""Side-by-side measurements; each writes one JSON file under ``results/``."""
