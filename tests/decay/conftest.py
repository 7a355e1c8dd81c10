from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from factorized.decay import native


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No C compiler: torch's own operations do it all."""
    monkeypatch.setattr(native, "cpu_kernels", lambda dtype: None)
