"""Runs the shared contract once per case that a layer's test class gives."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.contract")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = getattr(metafunc.cls, "cases", None)
    if cases is None or "case" not in metafunc.fixturenames:
        return
    flag = getattr(metafunc.function, "only", None)
    chosen = [case for case in cases if flag is None or getattr(case, flag)]
    metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])
