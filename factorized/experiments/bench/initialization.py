"""Spectral initialization of one matrix: exact, ours, ``torch.svd_lowrank``, and peft's PiSSA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from factorized.experiments.bench.session import Session, Way
from factorized.formats.svd import Method, spectral_factors

Product = Callable[[], Tensor]  # makes factors, and returns their product
EXACT = "exact SVD"


def compare_initializations(session: Session, sizes: tuple[int, ...] = (), shares: tuple[int, ...] = (32, 4)) -> None:
    """Time the factors of square Gaussian matrices, the hardest spectrum, and their error over the best one's."""
    if find_spec("peft") is None:
        session.skip("PiSSA", "peft is not installed: pip install peft")
    for size in sizes or ((1024, 2048, 4096, 8192) if session.is_cuda else (512, 1024, 2048)):
        torch.manual_seed(0)
        dense = nn.Linear(size, size, bias=False, device=session.device)
        W = dense.weight.detach().normal_()
        for rank in (size // share for share in shares):
            ways: dict[str, Product] = {
                EXACT: partial(ours, W, rank, "exact"),
                "factorized": partial(ours, W, rank, "auto"),
                "torch.svd_lowrank": partial(lowrank, W, rank, 2),
                "torch.svd_lowrank, 8 iterations": partial(lowrank, W, rank, 8),
            }
            peers: dict[str, Product] = {}
            if find_spec("peft") is not None:
                peers["peft, PiSSA"] = partial(pissa, dense, rank, "pissa")
                peers["peft, PiSSA with 16 iterations"] = partial(pissa, dense, rank, "pissa_niter_16")
            errors: dict[str, float] = {}
            session.compare(
                f"spectral initialization, {size}×{size} at rank {rank}",
                {name: partial(_way, name, way, W, rank, errors) for name, way in ways.items()},
                {name: partial(_way, name, way, W, rank, errors) for name, way in peers.items()},
            )


def ours(W: Tensor, rank: int, method: Method) -> Tensor:
    """Return the product of the spectral factors."""
    U, V = spectral_factors(W, rank, method)
    return U @ V.mT


def lowrank(W: Tensor, rank: int, iterations: int) -> Tensor:
    """Return the product of ``torch.svd_lowrank``."""
    U, S, V = torch.svd_lowrank(W, rank, niter=iterations)
    return (U * S) @ V.mT


def pissa(dense: nn.Linear, rank: int, init: Literal["pissa", "pissa_niter_16"]) -> Tensor:
    """Return the product of the adapter that peft makes of a linear."""
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"init_lora_weights": init, "target_modules": ["0"]}
    config = LoraConfig(r=rank, lora_alpha=rank, **options)
    model = get_peft_model(nn.Sequential(copy.deepcopy(dense)), config)
    layer: Any = model.get_submodule("base_model.model.0")
    return layer.lora_B["default"].weight @ layer.lora_A["default"].weight


def _way(name: str, product: Product, W: Tensor, rank: int, errors: dict[str, float]) -> Way:
    """Return a way with its error over that of the exact one, which comes first."""

    def run() -> None:
        with torch.no_grad():
            product()

    with torch.no_grad():
        errors[name] = float((W - product()).norm())
    over = round(errors[name] / errors[EXACT], 5) if EXACT in errors else None
    return Way(run, {"width": len(W), "rank": rank, "error_over_optimum": over})
