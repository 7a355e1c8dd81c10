"""``fz.forms``: every product in a model, whatever modules hold its factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from factorized.layers.base import FactorizedLayer
from factorized.layers.conv import FactorizedConv
from factorized.layers.embedding import FactorizedEmbedding
from factorized.maths.kernel import grouped


@dataclass(frozen=True, eq=False)
class Factor:
    """A parameter, or a part of one, that is a factor of a product; batched over groups or heads."""

    parameter: nn.Parameter
    view: Callable[[Tensor], Tensor]  # a tensor shaped like the parameter -> its view (batch, long, rank)
    batch: int = 1  # groups or heads

    @property
    def value(self) -> Tensor:
        """The factor as it stands, without gradient history; of a sharded one, the rows that this rank has."""
        return self.part(self.parameter.detach())

    @property
    def is_whole(self) -> bool:
        """Whether the factor is its parameter, as it is, and no view of it is needed."""
        return self.batch == 1 and self.view is _one_group and not isinstance(self.parameter, DTensor)

    def part(self, tensor: Tensor) -> Tensor:
        """Return the factor's part of a tensor shaped like its parameter, such as the gradient, to be changed in place.

        It is (batch, long, rank), or of a sharded tensor (local rows, rank), groups not told apart.
        """
        return tensor.to_local() if isinstance(tensor, DTensor) else self.view(tensor)


@dataclass(frozen=True, eq=False)
class Form:
    """One product ``U M₁…M_d Vᵀ``, batched: a factorized layer, or all heads of an attention form."""

    name: str  # of the module it belongs to
    kind: str  # "linear", "conv" or "embedding"
    left: Factor
    middle: tuple[Factor, ...]
    right: Factor
    layer: FactorizedLayer | None = None  # where one module holds the whole product

    @property
    def U(self) -> Tensor:  # (batch, m, rank)
        """The left factor, differentiable."""
        return self.left.view(self.left.parameter)

    @property
    def V(self) -> Tensor:  # (batch, n, rank)
        """The right factor, differentiable."""
        return self.right.view(self.right.parameter)

    @property
    def inner(self) -> tuple[Tensor, ...]:  # each (batch, rank, rank)
        """The matrices between them, differentiable."""
        return tuple(factor.view(factor.parameter) for factor in self.middle)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, in the product's order."""
        return (self.left, *self.middle, self.right)


def forms(model: nn.Module) -> list[Form]:
    """Return every product in ``model``, each once, however many layers are tied to its factors."""
    found: dict[tuple[nn.Parameter, ...], Form] = {}
    for name, module in model.named_modules():
        if isinstance(module, FactorizedLayer):
            found.setdefault(module.factors, _layer_form(name, module))
    return list(found.values())


def factor_parameters(found: Sequence[Form]) -> dict[nn.Parameter, Form]:
    """Return every parameter that holds a factor, with the (first) form it belongs to."""
    owners: dict[nn.Parameter, Form] = {}
    for form in found:
        for factor in form.factors:
            owners.setdefault(factor.parameter, form)
    return owners


def _layer_form(name: str, layer: FactorizedLayer) -> Form:
    kind = "conv" if isinstance(layer, FactorizedConv) else "linear"
    if isinstance(layer, FactorizedEmbedding):
        kind = "embedding"
    groups = layer.shape.groups
    view = partial(grouped, groups=groups) if groups > 1 else _one_group
    left, *middle, right = (Factor(parameter, view, groups) for parameter in layer.factors)
    return Form(name, kind, left, tuple(middle), right, layer)


def _one_group(factor: Tensor) -> Tensor:  # (long, rank) -> (1, long, rank)
    return factor.unsqueeze(0)  # what ``grouped`` would return, in a fifth of its time
