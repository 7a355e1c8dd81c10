"""Runs the shared contract once per case that a layer's test class gives."""

from __future__ import annotations

import os

import pytest

# As the Makefile does, for those who run pytest by hand: bf16 on some hosts dies above this instruction set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.register_assert_rewrite("tests.composed_contract", "tests.contract", "tests.tensor_contract")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.cls, "cases", None)
    if cases is None or "case" not in metafunc.fixturenames:
        return
    flag = getattr(metafunc.function, "only", None)
    chosen = [case for case in cases if flag is None or getattr(case, flag)]
    metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])
