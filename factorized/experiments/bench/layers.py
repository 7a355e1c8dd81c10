"""One layer in the forms that people would write or install instead, at a tenth of its parameters, eagerly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from factorized.experiments.bench.session import Make, Session, Way
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker
from factorized.nn.running import count_parameters
from factorized.nn.timing import training_step
from factorized.surgery.factorize import factorize

RATIO = 0.1  # of the dense layer's parameters
OURS: dict[str, Scheme] = {
    "factorized, low rank": LowRank(),
    "factorized, Tensor-Train": TensorTrain(),
    "factorized, Tucker": Tucker(),
}
TRAINS = {"linear": "blocktt", "convolution": "tt"}  # tensorly-torch's names of tensor trains


def compare_layers(session: Session, width: int = 0, rows: int = 0, channels: int = 0, images: int = 0) -> None:
    """Time a linear and a convolution, trained and run: dense, ours, a plain pair of layers, tensorly-torch's.

    In bf16 on a GPU, in float32 on a CPU.
    """
    width, rows = width or (4096 if session.is_cuda else 1024), rows or (4096 if session.is_cuda else 256)
    channels, images = channels or (256 if session.is_cuda else 128), images or (128 if session.is_cuda else 8)
    if find_spec("tltorch") is None:
        session.skip("tensorly-torch", "not installed: pip install tensorly-torch")
    torch.manual_seed(0)
    made: dict[str, Any] = {"device": session.device, "dtype": torch.bfloat16 if session.is_cuda else torch.float32}
    linear = nn.Linear(width, width, bias=False, **made)
    title = f"linear {width}×{width}, {rows} rows"
    _compare(session, title, linear, pair_of_linears(linear), TRAINS["linear"], torch.randn(rows, width, **made))
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **made)
    title = f"convolution {channels}×{channels}×3×3, {images} images of 16×16"
    x = torch.randn(images, channels, 16, 16, **made)
    _compare(session, title, convolution, pair_of_convolutions(convolution), TRAINS["convolution"], x)


def _compare(session: Session, title: str, dense: nn.Module, pair: nn.Module, train: str, x: Tensor) -> None:
    makers: dict[str, Callable[[], nn.Module]] = {"dense": partial(copy.deepcopy, dense)}
    makers |= {name: partial(ours, dense, scheme) for name, scheme in OURS.items()}
    makers["a plain pair of layers"] = partial(copy.deepcopy, pair)
    peers: dict[str, Callable[[], nn.Module]] = {}
    if find_spec("tltorch") is not None:
        kinds = {"tensorly-torch, Tensor-Train": train, "tensorly-torch, Tucker": "tucker"}
        peers = {name: partial(theirs, dense, kind) for name, kind in kinds.items()}
    for passes, timed in (("training", _trained), ("inference", _inferred)):
        session.compare(f"{title}, {passes}", _ways(makers, timed, x), _ways(peers, timed, x))


def ours(dense: nn.Module, scheme: Scheme) -> nn.Module:
    """Return the layer in a format of this package."""
    model = nn.Sequential(copy.deepcopy(dense))
    return factorize(model, scheme, ratio=RATIO, keep_first_and_last=False, init="default")


def pair_of_linears(dense: nn.Linear) -> nn.Module:
    """Return two plain linears."""
    m, n = dense.weight.shape
    rank = round(RATIO * m * n / (m + n))
    return nn.Sequential(nn.Linear(n, rank, bias=False), nn.Linear(rank, m, bias=False)).to(dense.weight)


def pair_of_convolutions(dense: nn.Conv2d) -> nn.Module:
    """Return a convolution to few channels, and a 1×1 one after it."""
    m, n, k, _ = dense.weight.shape
    rank = round(RATIO * m * n * k * k / (m + n * k * k))
    first = nn.Conv2d(n, rank, k, padding=k // 2, bias=False)
    return nn.Sequential(first, nn.Conv2d(rank, m, 1, bias=False)).to(dense.weight)


def theirs(dense: nn.Module, kind: str) -> nn.Module:
    """Return the layer as tensorly-torch holds it, in the faster of its two ways of running.

    Without opt_einsum it contracts the factors of a linear in an order that takes gigabytes; composing is faster then.
    """
    from tltorch import FactorizedConv, FactorizedLinear

    device = next(dense.parameters()).device
    if isinstance(dense, nn.Linear):
        shape = folded(dense.in_features), folded(dense.out_features)
        run = "factorized" if torch.backends.opt_einsum.is_available() else "reconstructed"
        layer: nn.Module = FactorizedLinear(*shape, bias=False, factorization=kind, rank=RATIO, implementation=run)
    else:
        options = {"factorization": kind, "rank": RATIO, "implementation": "factorized", "decompose_weights": False}
        layer = FactorizedConv.from_conv(dense, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    return layer.to(device)


def folded(size: int) -> tuple[int, ...]:
    """Return three nearly equal numbers whose product is ``size``, a power of two."""
    bits = size.bit_length() - 1
    return tuple(2 ** (bits // 3 + (place < bits % 3)) for place in range(3))


def _ways(layers: dict[str, Callable[[], nn.Module]], timed: Callable[..., Way], x: Tensor) -> dict[str, Make]:
    return {name: partial(timed, make, x) for name, make in layers.items()}


def _trained(make: Callable[[], nn.Module], x: Tensor) -> Way:
    layer = make().to(x.dtype)
    return Way(training_step(layer, x.clone().requires_grad_()), {"parameters": count_parameters(layer)})


def _inferred(make: Callable[[], nn.Module], x: Tensor) -> Way:
    layer = make().to(x.dtype).eval()

    def run() -> None:
        with torch.no_grad():
            layer(x)

    return Way(run, {"parameters": count_parameters(layer)})
