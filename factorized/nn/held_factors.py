"""Modules that hold factors in place of some of their parameters.

Such a module keeps its class's forward. Its factors are in a child ``factors``, by the names of the parameters they
stand for. The weights are composed once per call, and whenever they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from factorized.formats.format import Format, Way
from factorized.nn.dense import dense_weight, format_of, refuse_dense
from factorized.nn.held_weight import HeldWeight
from factorized.nn.init import Init
from factorized.nn.layer import FactorizedLayer, Lowered
from factorized.nn.model import dotted

FACTORS = "factors"
# The composed weights of every module that is being called, per thread: threads may call one module at the same time.
CALLED: ContextVar[Mapping[nn.Module, Mapping[str, Tensor]]] = ContextVar("composed weights")


class FactorizedWeight(FactorizedLayer):
    """The factors of a weight that a larger module holds; calling it returns the composed weight."""

    known_ways: ClassVar[tuple[Way, ...]] = ("composed",)
    tunable = False
    is_held = True

    def __init__(
        self,
        dense_type: type[HeldWeight],
        dense_shape: tuple[int, ...],
        format: Format,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(format, "auto", device, dtype)
        self.dense_type = dense_type
        self.form_kind = dense_type.form_kind
        self._dense_shape = dense_shape
        self.bias = None

    @classmethod
    def from_dense(cls, dense: HeldWeight, format: Format | int, init: Init | None = "spectral") -> Self:
        """Return factors for ``dense``; ``init=None`` leaves them unfilled."""
        weight = dense_weight(dense)
        made = format_of(dense.matrix_shape, format, groups=dense.groups)
        layer = cls(type(dense), tuple(weight.shape), made, weight.device, weight.dtype)
        layer.take_over(dense, init)
        return layer

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the parameter that the factors stand for."""
        return self._dense_shape

    def dense_name(self, name: str) -> str:
        """Return the name of the parameter in the dense model, for the ``name`` of this module."""
        host, _, key = name.rpartition(".")
        return f"{host.removesuffix(FACTORS)}{key}"

    def factor_name(self, name: str) -> str:
        """Return the name of this module, for the ``name`` of the parameter in the dense model."""
        host, _, key = name.rpartition(".")
        return dotted(host, f"{FACTORS}.{key}")

    def weight_key(self, name: str) -> str:
        """Return the name of the parameter in a dense state dict, for the ``name`` of this module."""
        return self.dense_name(name)

    def set_weight(
        self,
        weight: Tensor,  # in the dense shape
    ) -> None:
        """Make the product the best approximation of ``weight`` at this rank (section 3.1)."""
        fits = isinstance(weight, Tensor) and tuple(weight.shape) == self.dense_shape
        super().set_weight(weight.reshape(self.shape.weight_shape) if fits else weight)

    def forward(self) -> Tensor:
        """Return the weight in the dense shape, with drop-connect and decay applied."""
        weight = self.format.adjusted(self.factors, self.adjust)
        return weight.reshape(self.dense_shape).to(self.factors[0].dtype)  # also under autocast

    def dense_skeleton(self) -> HeldWeight:
        """Return the weight on the meta device."""
        return self.dense_type(nn.Parameter(torch.empty(self.dense_shape, device="meta")), self.shape.groups)

    def carry(self, dense: nn.Module) -> None:
        """Copy the attributes set on the weight to every factor."""
        for factor in self.factors:
            vars(factor).update(vars(dense.weight))

    def lowered(self) -> list[Lowered]:
        """Return nothing: the module that holds the weight needs all of it."""
        return []

    @property
    def why_composed(self) -> str:
        """Why ``lowered`` is empty."""
        return "the module that holds it needs the whole weight"

    def settings_repr(self) -> list[str]:
        """Return the dense shape."""
        return ["x".join(map(str, self.dense_shape))]


class HoldsFactors(nn.Module):
    """A module with products for some of its parameters. Abstract: ``hold`` combines it with the module's class."""

    dense_type: ClassVar[type[nn.Module]]
    parameter_order: tuple[str, ...]  # of the dense module
    traced: Mapping[str, Tensor]  # in compiled calls, the composed weights: torch cannot trace context variables

    @property
    def held(self) -> dict[str, FactorizedWeight]:
        """The factors by the names of the parameters that they stand for."""
        return cast(dict[str, FactorizedWeight], self.get_submodule(FACTORS)._modules)

    def __getattr__(self, name: str) -> Any:
        """Return a composed weight, that of the call or else read-only as in every layer, or what torch finds."""
        children = self.__dict__["_modules"].get(FACTORS)
        layer: FactorizedWeight | None = None if children is None else children._modules.get(name)
        is_traced = torch.compiler.is_compiling()
        composed = self.__dict__.get("traced") or ({} if is_traced else CALLED.get({}).get(self, {}))
        if name in composed:
            return composed[name]
        if is_traced and layer is not None:
            return layer()
        return super().__getattr__(name) if layer is None else layer.weight.view(layer.dense_shape)

    def __setattr__(self, name: str, value: Any) -> None:
        """Decompose a weight into its factors, or set what torch would."""
        children = self.__dict__.get("_modules", {}).get(FACTORS)
        if children is None or name not in children._modules:
            super().__setattr__(name, value)
        else:
            children._modules[name].set_weight(value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        refuse_dense([f"{prefix}{name}" for name in self.held], state_dict, errors=others[-1])

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Compose the weights once, and call the dense module's forward with them in place."""
        composed, token = self.composed_weights(), None
        if torch.compiler.is_compiling():
            self.traced = composed
        else:
            token = CALLED.set({**CALLED.get({}), self: composed})
        try:
            return super().forward(*arguments, **keywords)
        finally:
            if token is None:
                self.traced = {}
            else:
                CALLED.reset(token)

    def composed_weights(self) -> dict[str, Tensor]:
        """Return the composed weights that replace parameters during a call, by name."""
        return {key: layer() for key, layer in self.held.items()}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let copies and pickles rebuild the class, which is derived at run time."""
        return _blank, (self.dense_type,), self.__getstate__()  # type: ignore[no-untyped-call]  # torch leaves it untyped


class HoldsGates(HoldsFactors):
    """A recurrent network with products for some of its gates. Abstract."""

    _flat_weights_names: list[str]
    hidden_size: int

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a bias as any module does; torch's networks would read, so compose, all weights for their list."""
        if name in self.__dict__.get("_parameters", ()):
            nn.Module.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def composed_weights(self) -> dict[str, Tensor]:
        """Return the weights; on a GPU in one block of memory with the biases, or else cuDNN warns."""
        composed = super().composed_weights()
        if not next(iter(composed.values())).is_cuda:
            return composed
        weights = {
            name: composed[name] if name in composed else getattr(self, name) for name in self._flat_weights_names
        }
        return _in_one_piece(weights, has_biases=bool(self.bias))

    @property
    def _flat_weights(self) -> list[Tensor]:
        """What torch's kernels take: all weights and biases, composed, in one order."""
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Tensor]) -> None:
        """Keep no list: composed weights are new in every call."""

    def _update_flat_weights(self) -> None:
        """Do nothing: there is no list to be out of date."""

    def _init_flat_weights(self) -> None:
        """Keep no references either."""
        self._flat_weight_refs: list[None] = []

    def flatten_parameters(self) -> None:
        """Do nothing: the weights of every call are new."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights as torch does, and decompose those that are products."""
        bound = self.hidden_size**-0.5
        for parameter in self._parameters.values():
            if parameter is not None:
                parameter.uniform_(-bound, bound)
        for layer in self.held.values():
            layer.set_weight(torch.empty_like(layer.weight).uniform_(-bound, bound))


def _in_one_piece(weights: Mapping[str, Tensor], has_biases: bool) -> dict[str, Tensor]:
    """Return the weights of a recurrent network as views of one tensor in cuDNN's order: all weights, then all biases.

    Where a network has no biases, cuDNN reads zeros in their place.
    """
    ordered = sorted(weights, key=lambda name: name.startswith("bias"))
    parts = [weights[name].reshape(-1) for name in ordered]
    if not has_biases:
        rows = sum(weight.shape[0] for name, weight in weights.items() if not name.startswith("weight_hr"))
        parts.append(parts[0].new_zeros(rows))
    pieces = torch.cat(parts).split([part.numel() for part in parts])
    return {name: piece.view_as(weights[name]) for name, piece in zip(ordered, pieces, strict=False)}


def hold(host: nn.Module, layers: Mapping[str, FactorizedLayer]) -> None:
    """Replace parameters of ``host`` by factors; its class becomes one that composes them."""
    dense_type: Any = type(host)
    order = tuple(host._parameters)
    for key in layers:
        del host._parameters[key]
    host.__class__ = _class_of(dense_type)
    host.__dict__.pop("_flat_weights", None)  # of recurrent networks: the dense parameters
    assert isinstance(host, HoldsFactors)  # by its new class
    host.parameter_order = order
    children = nn.Module()
    for key, layer in layers.items():
        children.add_module(key, layer)
    host.add_module(FACTORS, children.train(host.training))


def release(host: HoldsFactors, parameters: Mapping[FactorizedLayer, nn.Parameter]) -> None:
    """Make ``host`` the plain module again, in place, with a parameter for each of its factors."""
    made = {key: parameters[layer] for key, layer in host.held.items()}
    order = host.parameter_order
    del host._modules[FACTORS], host.parameter_order
    host.__dict__.pop("traced", None)
    host.__class__ = host.dense_type  # type: ignore[assignment]  # the other base of its class
    have = {**host._parameters, **made}
    host._parameters.clear()
    host._parameters.update({key: have[key] for key in (*order, *have) if key in have})
    if isinstance(host, nn.RNNBase):
        host._init_flat_weights()


@cache
def _class_of(dense_type: Any) -> Any:  # a class of modules, and one of HoldsFactors
    base = HoldsGates if issubclass(dense_type, nn.RNNBase) else HoldsFactors
    # torch.fx records the calls of what is in torch.nn
    own = {"dense_type": dense_type, "__module__": dense_type.__module__}
    return type(f"Factorized{dense_type.__name__}", (base, dense_type), own)


def _blank(dense_type: Any) -> Any:
    made = _class_of(dense_type)
    return made.__new__(made)
