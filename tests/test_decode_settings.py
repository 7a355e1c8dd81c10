"""``benchmarks.decode_settings`` in small, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode_settings, ring
from factorized.nn import one_row

SMALL = ["--width", "64", "--device", "cpu", "--rounds", "1", "--repeats", "1"]


def test_every_setting_is_timed_and_a_failure_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    real = decode_settings.apply

    def record(*given: Any) -> torch.Tensor:
        own = one_row.multiply_row is not ring.multiply_row
        seen.append(0 if own else ring.RING)
        if not own and ring.RING == 7:
            raise RuntimeError("out of resource: shared memory")
        return real(*given)

    monkeypatch.setattr(decode_settings, "apply", record)
    out = tmp_path / "settings.json"
    kernels = ["--kernel", "PROGRAMS=8", "--kernel", "RING=7", "--kernel", "RING=6144,WARPS=1"]
    decode_settings.main([*SMALL, *kernels, "--out", str(out)])
    plain, failed, by_ring, low_rank, dense = json.loads(out.read_text())["rows"]
    assert failed["failed"] == "RuntimeError: out of resource: shared memory"
    assert {0, 7, 6144} <= set(seen)
    assert one_row.multiply_row is not ring.multiply_row
    assert ring.RING == 12_288
    assert plain["error"] < 1e-6
    assert by_ring["error"] < 1e-6
    assert all(row["microseconds"] > 0 for row in (plain, by_ring, low_rank, dense))
    assert "out of resource" in capsys.readouterr().out


def test_bytes_are_those_of_the_matrices_of_a_layer() -> None:
    width, rank, hidden, _ = sizes = decode_settings.MODELS[64]
    layers, _ = decode_settings.draw(sizes, torch.float32, torch.device("cpu"))
    assert layers[0].nbytes == 4 * rank * (8 * width + 3 * (width + hidden))
