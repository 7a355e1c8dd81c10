"""The paper's networks against dense ones: the training step of ``factorized train``, and inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from factorized.experiments.bench.session import Make, Session, Way
from factorized.experiments.data.stand_in import stand_in
from factorized.experiments.recipes.find import load_recipe
from factorized.experiments.training.network import build_network
from factorized.experiments.training.processes import Processes
from factorized.experiments.training.trainer import Trainer
from factorized.nn.running import count_parameters
from factorized.nn.timing import capture
from factorized.surgery.lower import lower

# The recipes of a network by what a row is called; spectral initialization takes time and changes no speed
NETWORKS: Mapping[str, Mapping[str, str]] = {
    "ResNet-32x2": {
        "dense": "cifar10/resnet32x2",
        "low rank 0.1": "cifar10/resnet32x2-lowrank-0.1-fd",
        "low rank 0.02": "cifar10/resnet32x2-lowrank-0.02-fd",
    },
    "VGG-19": {"dense": "cifar10/vgg19", "low rank 0.1": "cifar10/vgg19-lowrank-0.1-fd"},
    "WideResNet-28-10": {
        "dense": "cifar10/wrn28-10",
        "low rank 0.0667": "cifar10/wrn28-10-lowrank-0.06667-fd",
        "low rank 0.0167": "cifar10/wrn28-10-lowrank-0.01667-fd",
        "Tensor-Train 0.0667": "cifar10/wrn28-10-tt-0.06667-fd",
        "Tucker 0.0667": "cifar10/wrn28-10-tucker-0.06667-fd",
    },
}
SMALLER = {"WideResNet-28-10": 4}  # batches on a CPU, where 32 images take minutes


def train_networks(session: Session, networks: Mapping[str, Mapping[str, str]] = NETWORKS, batch: int = 0) -> None:
    """Time the training step: augmentation, forward, backward, decay and SGD; on a GPU compiled, and one CUDA graph."""
    for network, recipes in networks.items():
        size = batch or (128 if session.is_cuda else SMALLER.get(network, 32))
        makers = {name: partial(training_way, recipe, size, session.device) for name, recipe in recipes.items()}
        session.compare(f"{network}, training step, batch {size}", makers)


def training_way(name: str, batch: int, device: torch.device) -> Way:
    """Return a recipe's training step on noise."""
    recipe = load_recipe(name, [f"run.batch={batch}"])
    trainer = Trainer(recipe, stand_in("noise", 10, 32, 3, 2 * batch), Processes(device), 0)
    trainer.source.start(0, 0)
    return Way(trainer.step, {"parameters": count_parameters(trainer.network)})


def run_networks(
    session: Session, networks: Mapping[str, Mapping[str, str]] = NETWORKS, batches: tuple[int, ...] = ()
) -> None:
    """Time inference: on a GPU in bf16, compiled, as one CUDA graph; on a CPU in float32, also after ``fz.lower``."""
    for network, recipes in networks.items():
        for size in batches or ((128,) if session.is_cuda else (1, SMALLER.get(network, 32))):
            makers: dict[str, Make] = {}
            for name, recipe in recipes.items():
                makers[name] = partial(inference_way, recipe, size, session.device)
                if name.startswith("low rank") and not session.is_cuda:  # compiled, both are the same products
                    makers[f"{name}, lowered"] = partial(inference_way, recipe, size, session.device, lower)
            session.compare(f"{network}, inference, batch {size}", makers)


def inference_way(
    name: str, batch: int, device: torch.device, change: Callable[[nn.Module], nn.Module] | None = None
) -> Way:
    """Return the forward pass of a recipe's network on noise."""
    network = build_network(load_recipe(name), stand_in("noise", 10, 32, 3), seed=0).eval()
    network = network if change is None else change(network)
    network = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's overloads forget it
    x = torch.randn(batch, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    return Way(inference(network, x), {"parameters": count_parameters(network)})


def inference(network: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a function that runs the network on ``x``; on a GPU compiled, and captured in a CUDA graph."""
    forward = torch.compile(network, fullgraph=True, dynamic=False) if x.is_cuda else network

    def run() -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False):
            forward(x)

    return capture(run) if x.is_cuda else run
