"""The mark of tests that run on a GPU; what they test is tested on the CPU too, where it is not CUDA's own."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
