"""Frobenius decay against what people write by hand: four products per layer in a loop, and a penalty by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from factorized.decay.forms import Form, forms
from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.experiments.bench.llama import ON_A_CPU, STRENGTH, LlamaSizes
from factorized.experiments.bench.session import Session, Way
from factorized.experiments.models.resnet import resnet32x2
from factorized.nn.linear import FactorizedLinear
from factorized.nn.timing import capture
from factorized.surgery.factorize import factorize

RATIO = 0.1
OURS, LOOP, PENALTY = "fz.FrobeniusDecay", "four products per layer, in a loop", "a penalty by autograd"
Build = Callable[[torch.device], nn.Module]
Decay = Callable[[nn.Module], Callable[[], object]]  # adds its gradients when called


def compare_decays(
    session: Session, build: Build | None = None, sizes: LlamaSizes | None = None, batch: int = 0
) -> None:
    """Time the decay alone, of many small products and of a few large ones, and within a training step."""
    build = build or build_resnet
    sizes = sizes or (LlamaSizes() if session.is_cuda else ON_A_CPU)
    alone: Mapping[str, Build] = {
        "ResNet-32x2 at 0.1": build,
        f"Llama's feed-forward at rank {sizes.rank}": partial(feed_forward, sizes),
    }
    ways = {OURS: by_hook, LOOP: by_loop, PENALTY: by_penalty}
    for name, products in alone.items():
        makers = {way: partial(_alone, make, products, session.device) for way, make in ways.items()}
        session.compare(f"decay of {name}, alone", makers)
    batch = batch or (128 if session.is_cuda else 32)
    steps = {way: partial(_in_step, way, build, batch, session.device) for way in ("ordinary decay", *ways)}
    session.compare(f"decay in the training step of ResNet-32x2 at {RATIO}, batch {batch}", steps)


def build_resnet(device: torch.device) -> nn.Module:
    """Return ResNet-32x2 at a tenth of its parameters."""
    torch.manual_seed(0)
    network = resnet32x2().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
    return factorize(network, ratio=RATIO, init="kaiming")


def feed_forward(sizes: LlamaSizes, device: torch.device) -> nn.ModuleList:
    """Return the feed-forward layers of the Llama alone."""
    torch.manual_seed(0)
    shapes = [(sizes.width, sizes.feed_forward)] * 2 + [(sizes.feed_forward, sizes.width)]
    with device:
        layers = [
            FactorizedLinear(*s, sizes.rank, bias=False, init="kaiming") for _ in range(sizes.layers) for s in shapes
        ]
    return nn.ModuleList(layers)


def by_hook(model: nn.Module) -> Callable[[], object]:
    """Return what ``fz.FrobeniusDecay`` does before a step."""
    return FrobeniusDecay(model, STRENGTH).apply_


def by_loop(model: nn.Module) -> Callable[[], object]:
    """Return a loop that adds the gradients by four small products per layer."""
    pairs = [(form.left.parameter, form.right.parameter) for form in forms(model)]

    @torch.no_grad()
    def decay() -> None:
        for U, V in pairs:
            if U.grad is not None and V.grad is not None:
                U.grad.add_(U @ (V.mT @ V), alpha=STRENGTH)
                V.grad.add_(V @ (U.mT @ U), alpha=STRENGTH)

    return decay


def by_penalty(model: nn.Module) -> Callable[[], object]:
    """Return a function that adds the gradients of λ/2 ‖U Vᵀ‖², each product formed and left to autograd."""
    found = forms(model)
    return lambda: penalty(found).backward()


def penalty(found: list[Form]) -> Tensor:
    """Return λ/2 Σ ‖U Vᵀ‖² of all products."""
    norms = [(form.left.parameter @ form.right.parameter.mT).square().sum() for form in found]
    return STRENGTH / 2 * torch.stack(norms).sum()


def _alone(make: Decay, build: Build, device: torch.device) -> Way:
    model = build(device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return Way(make(model), {"products": len(forms(model))})


def _in_step(way: str, build: Build, batch: int, device: torch.device) -> Way:
    """Return a training step, on a GPU in bf16, compiled and captured, with the decay in one of the ways."""
    model, is_cuda = build(device), device.type == "cuda"
    run = torch.compile(model, fullgraph=True, dynamic=False) if is_cuda else model
    x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    target = torch.randint(10, (batch,), device=device)
    ordinary = way == "ordinary decay"
    groups = model.parameters() if ordinary else parameter_groups(model, STRENGTH, decay_norms=True)
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=STRENGTH if ordinary else 0, fused=is_cuda)
    if way == OURS:
        FrobeniusDecay(model, STRENGTH).attach(optimizer)
    loop, found = by_loop(model), forms(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda, cache_enabled=False):
            loss = F.cross_entropy(run(x).float(), target)
        if way == PENALTY:
            loss = loss + penalty(found)
        loss.backward()
        if way == LOOP:
            loop()
        optimizer.step()

    return Way(capture(step) if is_cuda else step)
