"""``fz.load_dense``: a dense checkpoint into a factorized model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from factorized.attention.matrices import write_matrices
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model, module_names, named
from factorized.surgery.decompose import decompose_all
from factorized.surgery.heads import DenseAttention, shrunk_attention
from factorized.surgery.progress import Count
from factorized.surgery.state import Shapes, check_same, is_sharded, named_slots, plain_name, unwrapped

WRAPPER = "module."  # the prefix of DistributedDataParallel, and of AveragedModel
COUNT = "n_averaged"  # which the latter adds


def load_dense(model: Model, state_dict: Mapping[str, Tensor]) -> Model:
    """Fill a factorized ``model`` from the state dict of the dense model it came from, and return it.

    Factorized layers take the spectral factors of their dense weight (section 3.1), the heads of shrunk attention the
    best approximation of their forms, and the rest is copied. Names with the prefix of ``torch.compile``,
    ``DistributedDataParallel`` or ``AveragedModel`` are accepted; tied weights need only one of their names. Names,
    shapes and values are checked before anything changes.

    Raises:
        ValueError: the model has no factorized layer, is sharded or on the meta device, or ``state_dict`` does not fit.

    Examples:
        >>> dense = nn.Sequential(nn.Linear(64, 64))  # with trained weights
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 64))
        >>> model = fz.load_dense(model, dense.state_dict())
        >>> torch.allclose(model[0].weight, dense[0].weight, atol=1e-5)
        True
    """
    check_model(model)
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"state_dict must map names to tensors, got {type(state_dict).__name__}; of a model, pass "
            "model.state_dict(), and of a file, torch.load(path)"
        )
    inside = unwrapped(model)
    state = _plain(state_dict, inside)
    slots = _Slots(inside)
    _check_real(inside)
    for key, layer in slots.weights.items():
        with named(key.rpartition(".")[0]):
            layer.check_settable()
    slots.check(state)
    weights, heads = slots.weights, [unit.best(state) for unit in slots.attention]
    given: dict[nn.Parameter, str] = {}  # tied layers once, under the first of their names
    for key, layer in weights.items():
        if key in state:
            given.setdefault(layer.factors[0], key)
    dense = {key: state[key].to(factor.device) for factor, key in given.items()}
    for key, values in decompose_all(dense, {key: weights[key] for key in dense}, Count(None, len(dense))).items():
        weights[key].set_factors(*values)
    for unit, matrices in zip(slots.attention, heads, strict=True):
        write_matrices(unit.unit, matrices)
    with torch.no_grad():
        for name, tensor in slots.plain.items():
            if name in state:
                tensor.copy_(state[name])
    return model


def _plain(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict without the prefixes of wrappers; raise if it holds anything but tensors."""
    for key, value in state_dict.items():
        if not isinstance(value, Tensor):
            inside = f"; the weights may be in state_dict[{key!r}]" if isinstance(value, Mapping) else ""
            raise ValueError(
                f"state_dict must map names to tensors, got {type(value).__name__} for {key!r}{inside}. Nothing was "
                "changed"
            )
    own = any(name.startswith(WRAPPER) for name, _, _, _ in named_slots(model))
    state = {plain_name(key): value for key, value in state_dict.items()}
    inside = {key: value for key, value in state.items() if key != COUNT}
    while not own and inside and all(key.startswith(WRAPPER) for key in inside):  # one wrapper may be in another
        state = inside = {key.removeprefix(WRAPPER): value for key, value in inside.items()}
    return state


class _Slots:
    """What a dense checkpoint fills: weights of factorized layers, shrunk attention, and all other tensors."""

    def __init__(self, model: nn.Module) -> None:
        places = module_names(model)
        layers = {
            plain_name(name): module
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, FactorizedLayer)
        }
        self.weights = {layer.weight_key(name): layer for name, layer in layers.items()}
        self.attention = [
            DenseAttention(unit, [plain_name(name) for name in places[unit.module]]) for unit in shrunk_attention(model)
        ]
        if not (layers or self.attention):
            raise ValueError(f"{type(model).__name__} has no factorized layer; use its own load_state_dict")
        factors = {factor for layer in layers.values() for factor in layer.factors}
        tensors = [(name, tensor) for name, _, _, tensor in named_slots(model)]
        self.factors = {name for name, tensor in tensors if tensor in factors}
        self.plain = {
            name: tensor
            for name, tensor in tensors
            if not (name in self.factors or any(unit.owns(tensor) for unit in self.attention))
        }

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise unless a state dict has their names and shapes; of tied tensors one name is enough."""
        if (held := sorted(state.keys() & self.factors)) and not state.keys() & self.weights.keys():
            raise ValueError(
                f"state_dict holds factors ({held[0]}), so it is of a factorized model; use model.load_state_dict. "
                "Nothing was changed"
            )
        expected: Shapes = {name: tuple(tensor.shape) for name, tensor in self.plain.items()}
        expected |= {key: layer.dense_shape for key, layer in self.weights.items()}
        tensors = {**self.plain, **{key: layer.factors[0] for key, layer in self.weights.items()}}
        given = {tensor for name, tensor in tensors.items() if name in state}
        optional = [name for name, tensor in tensors.items() if tensor in given]
        for unit in self.attention:
            expected |= unit.shapes
            optional += unit.given_elsewhere(state)
        found = {key: tuple(value.shape) for key, value in state.items()}
        check_same("the dense checkpoint", expected, found, optional=optional)


def _check_real(model: nn.Module) -> None:
    empty = [name for name, _, _, tensor in named_slots(model) if tensor.is_meta]
    if empty:
        raise ValueError(
            f"{empty[0]} is on the meta device and cannot be filled: give the model memory first, with "
            'model.to_empty(device="cpu"). Nothing was changed'
        )
    if is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is sharded over processes, but loading needs whole factors; load before "
            "fully_shard. Nothing was changed"
        )
