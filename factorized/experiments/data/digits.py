"""scikit-learn's digits, which come with it: 1,797 handwritten digits of 8×8 pixels."""

from __future__ import annotations

import numpy as np
import torch

from factorized.experiments.data.extras import need
from factorized.experiments.data.images import Images
from factorized.experiments.data.known import make_images

EVERY = 5  # of each class, in the order of the file, the last of five goes to the test set


def load_digits() -> Images:
    """Return the digits with their 17 levels of gray spread over 0..255, a fifth of each class for the test."""
    bunch = need("sklearn.datasets", "scikit-learn", "the digits data set").load_digits()
    levels, labels = np.asarray(bunch.images), np.asarray(bunch.target)
    x = torch.from_numpy(np.rint(levels * (255 / 16)).astype(np.uint8))[:, None]  # (1797, 1, 8, 8)
    y = torch.from_numpy(labels.astype(np.int64))
    test = torch.zeros(len(y), dtype=torch.bool)
    for digit in range(10):
        test[(y == digit).nonzero().flatten()[EVERY - 1 :: EVERY]] = True
    classes = tuple(str(digit) for digit in range(10))
    return make_images("digits", (x[~test], y[~test]), (x[test], y[test]), classes, "scikit-learn's digits")
