"""What holds for all tests, also when pytest is run by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

# As the Makefile does, for those who run pytest by hand: bf16 on some hosts dies above this instruction set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.register_assert_rewrite("factorized.testing")
settings.register_profile("factorized", deadline=None)  # a busy machine is no failure
settings.load_profile("factorized")


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


@pytest.fixture
def torch_s_settings() -> Iterator[None]:
    """Restore what compiled training sets."""
    import torch

    theirs = {"autograd_cache_allow_custom_autograd_functions": False, "backward_pass_autocast": "same_as_forward"}
    with torch._functorch.config.patch(theirs):
        yield


@pytest.fixture
def cacheable_programs(
    torch_s_settings: None, fresh_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> list[GraphModule]:
    """Let ``torch.compile`` only trace, and raise for programs that torch's cache does not take; list the others."""
    import torch
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    found: list[GraphModule] = []

    def check(program: GraphModule, example: list[Tensor]) -> Callable[..., object]:
        check_cacheable(program)  # raises for what is compiled again by every process
        found.append(program)
        return program.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=check))
    return found
