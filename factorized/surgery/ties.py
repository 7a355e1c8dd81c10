"""The notes of transformers on which parameters of a model are tied, kept true when layers are replaced.

``tie_weights`` and ``save_pretrained`` go by names such as ``lm_head.weight``, which factorized layers have no
parameters of: there it is their factors that are tied, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

NOTES = ("_tied_weights_keys", "all_tied_weights_keys")  # target by source: of the class, and of one model


def follow_ties(model: nn.Module) -> None:
    """Let the notes in ``model`` name the parameters that the tied layers share now."""
    for module in model.modules():
        for note in NOTES:
            ties = getattr(module, note, None)
            if isinstance(ties, Mapping) and ties and (followed := _followed(module, ties)) != ties:
                setattr(module, note, followed)


def _followed(module: nn.Module, ties: Mapping[str, str]) -> dict[str, str]:
    held = dict(module.named_parameters(remove_duplicate=False))
    followed: dict[str, str] = {}
    for target, source in ties.items():
        is_pattern = not re.fullmatch(r"[\w.]+", target + source)  # it names many parameters, and finds them itself
        is_there = target in held and source in held
        shared = {} if is_there or is_pattern else _shared(held, target.rpartition(".")[0], source.rpartition(".")[0])
        followed |= shared or {target: source}
    return followed


def _shared(held: Mapping[str, nn.Parameter], target: str, source: str) -> dict[str, str]:
    """Return, by its name in one layer, the name in the other of every parameter that is in both."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in held.items():
        if name.startswith(f"{source}."):
            first.setdefault(parameter, name)
    inside = {name: parameter for name, parameter in held.items() if name.startswith(f"{target}.")}
    return {name: first[parameter] for name, parameter in inside.items() if parameter in first}
