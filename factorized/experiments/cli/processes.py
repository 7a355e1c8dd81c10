"""The number of this process, without importing torch."""

import os


def process_number() -> int:
    """Return the number of this process under ``torchrun``; 0 for one that is alone."""
    return int(os.environ.get("RANK", "0"))
