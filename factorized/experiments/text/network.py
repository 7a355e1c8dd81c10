"""The network of a text recipe, factorized, and its optimizer, with the decay attached."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from factorized.attention.register import adapter_of, find_attention
from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.decay.strength import LAYER_KINDS, Strength
from factorized.experiments.recipes.recipe import Factorize
from factorized.experiments.recipes.text import TextDecay, TextRecipe
from factorized.experiments.text.from_run import build_from_run
from factorized.experiments.text.models import build_text_model
from factorized.experiments.training.network import build_scheme, plan_by_recipe, plan_options
from factorized.nn.init import Init
from factorized.optim.flambe import Flambe
from factorized.optim.lamb import Lamb
from factorized.planning.plan import Plan
from factorized.surgery.compose import is_factorized
from factorized.surgery.factorize import factorize
from factorized.surgery.shrink import spectral_init_attention


def plan_text(recipe: TextRecipe, dense: nn.Module) -> Plan | None:
    """Return the plan of the recipe's factorization; None for a dense network."""
    scheme = build_scheme(recipe.factorize)
    if scheme is None:
        return None
    if recipe.factorize.attention not in ("layers", False):
        _check_heads(recipe.factorize, dense)
    return plan_by_recipe(dense, scheme, plan_options(recipe.factorize))


def _check_heads(fields: Factorize, dense: nn.Module) -> None:
    """Raise if heads that are to be shrunk cannot be read, or would have no dimension left."""
    for found in find_attention(dense):
        if adapter_of(found.module) is None:
            raise ValueError(f'{found.name}: {found.reason} before train_text, or set factorize.attention = "layers"')
        size = found.unit.head_size if found.unit is not None else 1
        if fields.rank_scale is not None and round(fields.rank_scale * size) < 1:
            raise ValueError(
                f"factorize.rank_scale = {fields.rank_scale:g} leaves a head of {found.name} without dimensions: it "
                f"has {size}, so ask for {math.ceil(1e4 / size) / 1e4:g} or more, up to 1"
            )


def starting_network(recipe: TextRecipe, tokenizer: Any, seed: int) -> nn.Module:
    """Return the network that the recipe factorizes: drawn with ``seed``, or that of a run, which may be factorized."""
    run = recipe.model.from_run
    return build_text_model(recipe, tokenizer, seed) if run is None else build_from_run(recipe, run, seed)


def build_text_network(recipe: TextRecipe, tokenizer: Any, seed: int) -> nn.Module:
    """Return the recipe's network on the CPU, factorized, drawn with ``seed``."""
    dense = starting_network(recipe, tokenizer, seed)
    plan = None if is_factorized(dense) else plan_text(recipe, dense)
    if plan is not None:
        return factorize(dense, plan, init=_init(recipe, dense))
    if recipe.model.attention_init == "spectral":
        return spectral_init_attention(dense, forms=("ov",))
    return dense


def _init(recipe: TextRecipe, dense: Any) -> Init | None:
    """Return how factors are filled."""
    if recipe.factorize.init != "network":
        return recipe.factorize.init
    # transformers draws embeddings and linear layers alike
    return partial(nn.init.normal_, std=dense.get_input_embeddings().weight.std().item())


def build_text_optimizer(recipe: TextRecipe, model: nn.Module) -> Optimizer:
    """Return the recipe's optimizer over the model's parameters, its decay attached.

    Norms and biases are not decayed. AdamW decays products as it decays weights, apart from the gradient; SGD and LAMB
    get the decay with the gradient, and FLAMBé is LAMB that does not.
    """
    fields, decay = recipe.optimizer, recipe.decay
    strength = _strength(decay)
    products = decay.kind == "frobenius"
    groups = _groups(recipe, model)
    # So that no update waits for a GPU, LAMB skips and counts gradients that are not finite there.
    settings: dict[str, Any] = {"lr": fields.lr, "betas": fields.betas, "max_grad_norm": None, "capturable": True}
    if fields.name == "flambe":
        return Flambe(groups, model, frobenius_decay=strength, **settings)
    optimizer: Optimizer
    if fields.name == "lamb":
        optimizer = Lamb(groups, **settings)
    elif fields.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=fields.lr, momentum=fields.momentum, nesterov=fields.nesterov)
    else:
        optimizer = torch.optim.AdamW(groups, lr=fields.lr, betas=fields.betas, fused=True)
    if products:
        FrobeniusDecay(model, strength, decoupled=fields.name == "adamw").attach(optimizer)
    return optimizer


def _strength(decay: TextDecay) -> Strength:
    """Return how strongly each form is decayed: one number decays layers, and OV where attention has that form."""
    if decay.forms is None:
        return decay.strength
    return {kind: decay.strength for form in decay.forms for kind in (LAYER_KINDS if form == "layers" else (form,))}


def _groups(recipe: TextRecipe, model: nn.Module) -> list[dict[str, Any]]:
    decay = recipe.decay
    if decay.kind == "frobenius":
        attention = ("ov",) if decay.forms is None else [form for form in decay.forms if form != "layers"]
        return parameter_groups(model, decay.of_the_rest, attention=attention)
    strength = decay.strength if decay.kind == "weight" else 0.0
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": strength},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]


def build_schedule(recipe: TextRecipe, optimizer: Optimizer) -> LambdaLR:
    """Return the schedule of the learning rate, update by update."""
    return LambdaLR(optimizer, recipe.schedule.factor)
