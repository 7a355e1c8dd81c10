"""``python -m factorized.cli.demo``: plan, factorize and compose a small ResNet, and check every step."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from copy import deepcopy

import torch
from torch import Tensor, nn

from factorized.deploy.checkpoint import load, save
from factorized.deploy.compose import compose
from factorized.deploy.lower import lower
from factorized.layers.swap import factorize
from factorized.layers.timing import median_milliseconds, training_step
from factorized.planning.planner import plan as make_plan
from factorized.planning.scheme import Overcomplete
from factorized.vision.models.resnet import resnet

RATIO = 0.1
Check = tuple[str, float, float]  # what, measured, allowed


def main() -> int:
    """Run the demonstration; return 1 if a check fails."""
    torch.manual_seed(0)
    dense = resnet(20).eval()
    images = torch.randn(8, 3, 32, 32)
    plan = make_plan(dense, ratio=RATIO, example_input=images[:1])
    print(plan)
    model = factorize(deepcopy(dense), plan)
    print(f"\nOne of its layers:\n  {model.get_submodule(plan.selected[-1].name)}\n\nChecks:")
    failed = 0
    with torch.no_grad():
        for what, measured, allowed in _checks(dense, model, images, plan.ratio):
            passed = measured <= allowed
            failed += not passed
            print(f"  {'ok  ' if passed else 'FAIL'}  {what}: {measured:.1e} (allowed {allowed:.0e})")
    print(f"\nOne training step at batch {len(images)}: {_speed(dense, model, images)}")
    return 1 if failed else 0


def _checks(dense: nn.Module, model: nn.Module, images: Tensor, ratio: float) -> Iterator[Check]:
    full = factorize(deepcopy(dense), Overcomplete("full"), init="spectral")
    expected = model(images)
    yield "parameters above the budget", max(0.0, ratio - RATIO), 0.0
    yield "parameters below the budget", max(0.0, RATIO - ratio) / RATIO, 0.005
    yield "full-rank spectral init against the dense model", _error(full(images), dense(images)), 1e-4
    yield "compose: plain dense modules", _error(compose(model)(images), expected), 1e-5
    yield "lower: plain low-rank modules", _error(lower(model)(images), expected), 1e-5
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder)
        yield "save and load", _error(load(folder, resnet(20).eval())(images), expected), 0.0


def _error(y: Tensor, expected: Tensor) -> float:
    return ((y - expected).norm() / expected.norm()).item()


def _speed(dense: nn.Module, model: nn.Module, images: Tensor) -> str:
    steps: dict[str, Callable[[], object]] = {
        name: training_step(network.train(), images) for name, network in (("dense", dense), ("factorized", model))
    }
    times = median_milliseconds(steps, cuda=False, rounds=7)
    return f"dense {times['dense']:.1f} ms, factorized {times['factorized']:.1f} ms (median of 7, interleaved)"


if __name__ == "__main__":
    sys.exit(main())
