"""The digits that come with scikit-learn: 1,797 handwritten digits of 8×8 pixels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from factorized.experiments.data.extras import not_installed
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import make_images

EVERY = 5  # of each class, in the order of the file, the last of five goes to the test set


def load_digits() -> Images:
    """Return the digits with their 17 levels of gray spread over 0..255, a fifth of each class for the test."""
    rows = np.loadtxt(_file(), delimiter=",")  # (1797, 65): 64 levels, then the label
    x = torch.from_numpy(np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1].astype(np.int64))
    test = torch.zeros(len(y), dtype=torch.bool)
    for digit in range(10):
        test[(y == digit).nonzero().flatten()[EVERY - 1 :: EVERY]] = True
    classes = tuple(str(digit) for digit in range(10))
    return make_images("digits", (x[~test], y[~test]), (x[test], y[test]), classes, "scikit-learn's digits")


def _file() -> Path:
    """Return the path of the digits, without importing scikit-learn, which takes more than a second."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(not_installed("the digits data set", "scikit-learn", "vision"), name="sklearn")
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
