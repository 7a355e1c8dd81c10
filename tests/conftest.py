"""What holds for all tests, also when pytest is run by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# As the Makefile does, for those who run pytest by hand: bf16 on some hosts dies above this instruction set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.register_assert_rewrite("factorized.testing")


@pytest.fixture
def own_attention() -> None:
    """Register the attention class of the tests, whatever another test has registered it as."""
    from tests.attention.attention_zoo import register_own

    register_own()


@pytest.fixture
def eight_processes() -> Iterator[None]:
    """Pretend to be the first of eight processes, whose collectives do nothing."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let the compiler forget what other tests compiled, and this one."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
