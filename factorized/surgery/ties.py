"""Transformers' notes on which parameters of a model are tied, updated when layers are replaced.

``tie_weights`` and ``save_pretrained`` go by names such as ``lm_head.weight``. Factorized layers have no parameters of
these names; their factors are tied instead, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

NOTES = ("_tied_weights_keys", "all_tied_weights_keys")  # target by source: of the class, and of one model


def follow_ties(model: nn.Module) -> None:
    """Update the notes in ``model`` to name the parameters that the tied layers share now."""
    for module in model.modules():
        for note in NOTES:
            ties = getattr(module, note, None)
            if isinstance(ties, Mapping) and ties and (followed := _followed(module, ties)) != ties:
                setattr(module, note, followed)


def _followed(module: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    held = dict(module.named_parameters(remove_duplicate=False))
    followed: dict[str, str] = {}
    for target, source in ties.items():
        is_pattern = not re.fullmatch(r"[\w.]+", target + source)  # it matches many parameters, and needs no update
        is_there = target in held and source in held
        shared = {} if is_there or is_pattern else _shared(held, target.rpartition(".")[0], source.rpartition(".")[0])
        followed |= shared or {target: source}
    return followed


def _shared(held: Mapping[str, nn.Parameter], target: str, source: str) -> dict[str, str]:
    """Return the parameters that both layers hold: their names in ``target``, with those in ``source``."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in held.items():
        if name.startswith(f"{source}."):
            first.setdefault(parameter, name)
    inside = {name: parameter for name, parameter in held.items() if name.startswith(f"{target}.")}
    return {name: first[parameter] for name, parameter in inside.items() if parameter in first}
