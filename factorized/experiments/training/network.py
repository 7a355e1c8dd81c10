"""Build a recipe's network, factorized, and its optimizer with the decay attached."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD

from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.experiments.data.explain import place_and_reason
from factorized.experiments.data.images import Images
from factorized.experiments.models.build import build_for
from factorized.experiments.recipes.recipe import Factorize, Recipe
from factorized.formats.scheme import Scheme
from factorized.nn.layer import FactorizedLayer
from factorized.nn.running import evaluation_mode
from factorized.planning.advice import Change, OutOfReach
from factorized.planning.cost import measure
from factorized.planning.plan import Plan
from factorized.planning.planner import PlanOptions
from factorized.planning.planner import plan as make_plan
from factorized.planning.schemes import SCHEMES_BY_NAME, read_scheme
from factorized.surgery.factorize import factorize
from factorized.surgery.progress import Progress


@dataclasses.dataclass(frozen=True)
class Start:
    """A network to train further, in place of the one that a recipe builds, and the plan that factorized it, if any."""

    network: nn.Module
    plan: Plan | None


def build_dense(recipe: Recipe, images: Images, seed: int) -> nn.Module:
    """Return the recipe's network before factorization, drawn with ``seed``."""
    torch.manual_seed(seed)
    return build_for(recipe.model.name, images)


def build_scheme(fields: Factorize) -> Scheme | None:
    """Return the scheme that these fields describe; None for a dense network."""
    if fields.scheme == "none":
        return None
    own = dataclasses.fields(SCHEMES_BY_NAME[fields.scheme])
    return read_scheme({"name": fields.scheme, **{field.name: getattr(fields, field.name) for field in own}})


def plan_options(fields: Factorize) -> PlanOptions:
    """Return the arguments of ``fz.plan`` that a recipe has: its fields of the same names."""
    names = PlanOptions.__annotations__.keys() & Factorize.model_fields.keys()
    return cast(PlanOptions, {name: getattr(fields, name) for name in names})


def plan_network(recipe: Recipe, dense: nn.Module, images: Images) -> Plan | None:
    """Return the plan of the recipe's factorization; None for a dense network."""
    scheme = build_scheme(recipe.factorize)
    if scheme is None:
        return None
    options = plan_options(recipe.factorize)
    options["example_input"] = torch.zeros(1, images.channels, *images.size)
    return plan_by_recipe(dense, scheme, options)


def plan_by_recipe(dense: nn.Module, scheme: Scheme, options: PlanOptions) -> Plan:
    """Return ``fz.plan`` of a recipe's fields; if they are out of reach, the error names fields to change."""
    try:
        return make_plan(dense, scheme, **options)
    except OutOfReach as error:
        raise ValueError(error.told(_as_fields, "see factorize.include and factorize.exclude")) from None


def _as_fields(change: Change) -> str:
    return " ".join(f"--set factorize.{name}={json.dumps(value)}" for name, value in change.items())


def build_network(recipe: Recipe, images: Images, seed: int) -> nn.Module:
    """Return the recipe's network on the CPU, factorized, drawn with ``seed``: the same on every machine."""
    dense = build_dense(recipe, images, seed)
    return factorize_network(recipe, dense, plan_network(recipe, dense, images))


def factorize_network(
    recipe: Recipe, dense: nn.Module, plan: Plan | None, progress: Progress | None = None
) -> nn.Module:
    """Factorize the recipe's dense network by its plan, in place, and return it; None leaves it dense."""
    if empty := [name for name, tensor in dense.state_dict().items() if tensor.is_meta]:
        raise ValueError(f"model {recipe.model.name!r}: {empty[0]} is on the meta device; build it with memory")
    if (bad := not_finite(dict(dense.named_parameters()))) is not None:
        raise ValueError(
            f"model {recipe.model.name!r}: {bad} holds NaN or infinity before training; fix the function or the "
            "weights that it is built from"
        )
    if plan is None:
        return dense
    network = factorize(dense, plan, init=recipe.factorize.init, progress=progress)
    for module in network.modules():
        if isinstance(module, FactorizedLayer) and module.form_kind == "conv":
            module.execution = recipe.factorize.execution
    return network


def not_finite(tensors: Mapping[str, Tensor], besides: Collection[str] = ()) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, except for ``besides``; None if there is none."""
    names = (name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all())
    return next((name for name in names if name not in besides), None)


def infinite_buffers(network: nn.Module) -> set[str]:
    """Return the buffers of a fresh network that may hold infinities, such as masks of -inf."""
    return {name for name, buffer in network.named_buffers() if not buffer.isfinite().all()}


def check_network(recipe: Recipe, network: nn.Module, images: Images) -> None:
    """Raise if the network cannot be trained to classify the images: a user's function may return anything."""
    name = recipe.model.name
    if recipe.data.crop_padding >= min(images.size):
        raise ValueError(
            f"data.crop_padding = {recipe.data.crop_padding} would crop images of {images.size[0]}×{images.size[1]} "
            f"out of sight: expected 0..{min(images.size) - 1}"
        )
    if recipe.data.cutout > min(images.size):
        raise ValueError(
            f"data.cutout = {recipe.data.cutout} would cut squares out of images of {images.size[0]}×{images.size[1]} "
            f"that are larger than the images: expected 0..{min(images.size)}"
        )
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(f"model {name!r} has no parameters that can be trained")
    answer = check_classifier(name, network, images)
    if not answer.requires_grad:
        raise ValueError(
            f"model {name!r} must return logits that its parameters can be trained by, got {answer.dtype} without a "
            "gradient: do not detach or round them"
        )


def check_classifier(name: str, network: nn.Module, images: Images) -> Tensor:  # (2, classes)
    """Return what the network makes of two black images; raise unless these are logits of the classes."""
    example = torch.zeros(2, images.channels, *images.size)
    try:
        with evaluation_mode(network), torch.enable_grad():
            answer = network(example)
    except (Exception, SystemExit) as error:  # layers that do not fit each other or the images; own mistakes
        raise ValueError(
            f"model {name!r} cannot classify images {tuple(example.shape[1:])}: it failed {place_and_reason(error)}"
        ) from error
    classes = len(images.classes)
    if not isinstance(answer, Tensor) or answer.shape != (2, classes):
        got = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ValueError(f"model {name!r} must return a tensor (images, {classes}), got {got} for two images")
    return answer


def count_macs(network: nn.Module, plan: Plan | None, images: Images) -> int:
    """Return the multiply-accumulates of the network for one image, products applied factor by factor.

    That is what the method costs, however a layer runs on this machine.
    """
    if plan is not None and plan.macs_after is not None:
        return plan.macs_after
    return measure(network, torch.zeros(1, images.channels, *images.size), {}).macs


def build_optimizer(recipe: Recipe, network: nn.Module) -> SGD:
    """Return SGD over the network's parameters with the recipe's decay attached, its momentum there from the start.

    On a GPU the learning rate is a tensor, so that a captured step follows the schedule. Momentum that starts as zeros
    is the same as none, and lets every later run copy its own into place.
    """
    fields, device = recipe.optimizer, next(network.parameters()).device
    lr: float | Tensor = torch.tensor(fields.lr, device=device) if device.type == "cuda" else fields.lr
    optimizer = SGD(
        _groups(recipe, network),
        lr=lr,
        momentum=fields.momentum,
        nesterov=fields.nesterov,
        fused=device.type == "cuda",
    )
    if recipe.decay.kind == "frobenius":
        # Products of full rank and most tensors are composed to run: adding λW in their backward pass is next to free,
        # and exact where nothing rescales the gradients after it. Low-rank layers would be slowed down by composing.
        in_backward = recipe.factorize.scheme != "low_rank" and fields.clip is None
        FrobeniusDecay(network, recipe.decay.strength, in_backward=in_backward).attach(optimizer)
    if fields.momentum:
        for parameter in trained_parameters(optimizer):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _groups(recipe: Recipe, network: nn.Module) -> Sequence[dict[str, Any]]:
    decay = recipe.decay
    if decay.kind == "weight":
        return [{"params": [p for p in network.parameters() if p.requires_grad], "weight_decay": decay.strength}]
    strength = decay.strength if decay.kind == "crs" else decay.of_the_rest
    # The paper decays every parameter, those of normalization and the biases too.
    return parameter_groups(network, strength, decay_norms=True, decay_biases=True, crs=decay.kind == "crs")


def trained_parameters(optimizer: SGD) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def set_learning_rate(optimizer: SGD, lr: float) -> None:
    """Set the learning rate of all groups, in place where it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
