"""``fz.forms``: every product in a model, whatever modules hold its factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from factorized.adapters.table import find_attention
from factorized.adapters.unit import KINDS, AttentionUnit, FormKind, Projection
from factorized.decay.local import check_placements, projection_part
from factorized.layers.base import FactorizedLayer
from factorized.layers.composed import ComposedLayer
from factorized.layers.conv import FactorizedConv
from factorized.layers.embedding import FactorizedEmbedding
from factorized.layers.tensor import TensorizedLayer
from factorized.maths.frobenius import compose, frobenius_norm_squared
from factorized.maths.kernel import KernelShape, grouped, to_matrix
from factorized.maths.tensor_format import TensorFormat
from factorized.planning.model import check_model


@dataclass(frozen=True, eq=False)
class Factor:
    """A parameter, or a part of one, that is a factor of a product; batched over groups or heads."""

    name: str  # of the parameter, in the model
    parameter: nn.Parameter
    view: Callable[[Tensor], Tensor]  # a tensor shaped like the parameter -> its view (batch, long, rank), or a core
    batch: int = 1  # groups or heads
    projection: Projection | None = None  # of attention: which part of the parameter it is

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

        It is (batch, long, rank), or of a sharded tensor the local part of it in two dimensions, with groups or heads
        not told apart.
        """
        if not isinstance(tensor, DTensor):
            return self.view(tensor)
        return tensor.to_local() if self.projection is None else projection_part(self.projection, tensor)

    @property
    def differentiable(self) -> Tensor:
        """The factor with its gradient history; a sharded one is gathered where groups or heads cross its shards."""
        crosses = self.projection is not None or self.batch > 1
        return self.whole if crosses else self.view(self.parameter)

    @property
    def whole(self) -> Tensor:
        """The factor with its gradient history; a sharded one is gathered, so all ranks must ask."""
        parameter: Tensor = self.parameter
        return self.view(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


@dataclass(frozen=True, eq=False)
class Form:
    """One product ``U M₁…M_d Vᵀ``, batched: a factorized layer, or all heads of an attention form.

    Of attention, ``"qk"`` is ``Q_h K_hᵀ`` and ``"ov"`` is ``V_h O_hᵀ``. Where query heads share a K/V head, the batch
    is (K/V heads, query heads of each), with 1 in the second place for the shared matrix.
    """

    name: str  # of the module it belongs to; of attention with its kind: "encoder.0.self_attn.ov"
    kind: str  # "linear", "conv", "embedding", "qk" or "ov"
    left: Factor
    middle: tuple[Factor, ...]
    right: Factor
    layer: ComposedLayer | None = None  # where one module holds the whole product
    rotary: bool = False  # of "qk": positions turn queries and keys, so that this is no single bilinear form

    @property
    def U(self) -> Tensor:  # (batch, m, rank)
        """The left factor, differentiable."""
        return self.left.differentiable

    @property
    def V(self) -> Tensor:  # (batch, n, rank)
        """The right factor, differentiable."""
        return self.right.differentiable

    @property
    def inner(self) -> tuple[Tensor, ...]:  # each (batch, rank, rank)
        """The matrices between them, differentiable."""
        return tuple(factor.differentiable for factor in self.middle)

    @property
    def factors(self) -> tuple[Factor, ...]:
        """All factors, in the product's order."""
        return (self.left, *self.middle, self.right)

    @property
    def numel(self) -> int:
        """Entries of the product."""
        if self.layer is not None:
            return self.layer.shape.numel
        batch = torch.broadcast_shapes(self.U.shape[:-2], self.V.shape[:-2])
        return batch.numel() * self.U.shape[-2] * self.V.shape[-2]

    @property
    def values(self) -> list[Tensor]:
        """All factors in the product's order, differentiable; sharded ones are gathered, so all ranks must ask."""
        return [factor.whole for factor in self.factors]

    def compose(self, values: Sequence[Tensor]) -> Tensor:  # (batch, m, n)
        """Return the product of ``values``, which stand for the factors."""
        return compose(values[0], values[-1], values[1:-1]).flatten(0, -3)

    def norm_squared(self, values: Sequence[Tensor]) -> Tensor:  # (batch,)
        """Return ‖U M₁…M_d Vᵀ‖² of ``values``, which stand for the factors."""
        return frobenius_norm_squared(values[0], values[-1], values[1:-1])


@dataclass(frozen=True, eq=False)
class TensorForm:
    """One tensor in a format: the weight of a tensorized layer, or the pointwise part of a separable one."""

    name: str  # of the module it belongs to
    kind: str  # "tensor_train" or "tucker"
    factors: tuple[Factor, ...]  # the cores
    format: TensorFormat
    shape: KernelShape  # of the weight that the tensor is
    layer: ComposedLayer | None = None

    @property
    def cores(self) -> tuple[Tensor, ...]:
        """The cores, differentiable, in the format's order."""
        return tuple(factor.parameter for factor in self.factors)

    @property
    def numel(self) -> int:
        """Entries of the tensor."""
        return self.format.numel

    @property
    def values(self) -> list[Tensor]:
        """The cores, differentiable; sharded ones are gathered, so all ranks must ask."""
        return [factor.whole for factor in self.factors]

    def compose(self, values: Sequence[Tensor]) -> Tensor:  # (groups, m, n)
        """Return the tensor as the matrices that low rank would read its weight as."""
        return to_matrix(self.format.expand(values).reshape(self.shape.weight_shape), self.shape)

    def norm_squared(self, values: Sequence[Tensor]) -> Tensor:  # ()
        """Return the squared norm of the whole tensor, by contraction where that is cheaper."""
        return self.format.norm_squared(values)


AnyForm = Form | TensorForm
Names = Mapping[Tensor, str]  # of parameters


def forms(model: nn.Module) -> list[AnyForm]:
    """Return every product in ``model``, each once, however many layers are tied to its factors.

    Low-rank layers give a ``Form`` with ``U``, ``inner`` and ``V``, tensorized ones a ``TensorForm`` with ``cores``.
    Attention is two products a module, of the kinds ``"qk"`` and ``"ov"``, where an adapter can read it: see
    ``fz.register_attention``.

    Every factor must be a parameter of the model: one that a parametrization or pruning computes is refused. So are
    factors of one product that are not distributed over the same ranks.
    """
    check_model(model)
    found: dict[tuple[object, ...], AnyForm] = {}
    names: Names = {parameter: name for name, parameter in model.named_parameters()}
    attention = {read.module: read.unit for read in find_attention(model)}
    for name, module in model.named_modules():
        if isinstance(module, FactorizedLayer):
            found.setdefault(module.factors, _layer_form(name, module, names))
        elif isinstance(module, TensorizedLayer):
            found.setdefault(module.factors, _tensor_form(name, module, names))
        unit = attention.get(module)
        if unit is None:
            continue
        for kind in KINDS:
            identity = [part for p in unit.form(kind) for part in (p.weight, p.start)]
            found.setdefault((kind, *identity), _attention_form(name, unit, kind, names))
    for form in found.values():
        check_placements({factor.name: factor.parameter for factor in form.factors})
    return list(found.values())


def unread_attention(model: nn.Module) -> str:
    """Return a sentence to end an error with, about attention of ``model`` that cannot be read; or nothing."""
    read = next((read for read in find_attention(model) if read.unit is None), None)
    return "" if read is None else f". Its attention {read.name or 'itself'!r} cannot be read: {read.reason}"


def is_attention(form: AnyForm) -> bool:
    """Return whether a form is one of attention."""
    return form.kind in KINDS


def factor_parameters(found: Sequence[AnyForm]) -> dict[nn.Parameter, AnyForm]:
    """Return every parameter that holds a factor, with the (first) form it belongs to."""
    owners: dict[nn.Parameter, AnyForm] = {}
    for form in found:
        for factor in form.factors:
            owners.setdefault(factor.parameter, form)
    return owners


def _layer_form(name: str, layer: FactorizedLayer, names: Names) -> Form:
    kind = "conv" if isinstance(layer, FactorizedConv) else "linear"
    if isinstance(layer, FactorizedEmbedding):
        kind = "embedding"
    groups = layer.shape.groups
    view = partial(grouped, groups=groups) if groups > 1 else _one_group
    parts = ["U", *(f"inner.{index}" for index in range(layer.depth)), "V"]
    _check_parameters(name, dict(zip(parts, layer.factors, strict=True)), names)
    left, *middle, right = (Factor(names[parameter], parameter, view, groups) for parameter in layer.factors)
    return Form(name, kind, left, tuple(middle), right, layer)


def _tensor_form(name: str, layer: TensorizedLayer, names: Names) -> TensorForm:
    _check_parameters(name, {f"cores.{index}": core for index, core in enumerate(layer.cores)}, names)
    cores = tuple(Factor(names[core], core, _as_it_is) for core in layer.cores)
    return TensorForm(name, layer.method, cores, layer.format, layer.folding.shape, layer)


def _check_parameters(name: str, factors: Mapping[str, Tensor], names: Names) -> None:
    """Raise unless the factors of a layer, by their names in it, are parameters: only those can be decayed."""
    for part, factor in factors.items():
        if factor not in names:
            raise ValueError(
                f"{f'{name}.{part}'.lstrip('.')} is not a parameter of the model: a parametrization, a weight norm, "
                "pruning or FSDP1 computes it, and a gradient of the product cannot be added to it. Make it a "
                "parameter again, by torch.nn.utils.parametrize.remove_parametrizations or "
                "torch.nn.utils.prune.remove, or leave this layer dense"
            )


def _as_it_is(core: Tensor) -> Tensor:
    return core


def _attention_form(name: str, unit: AttentionUnit, kind: FormKind, names: Names) -> Form:
    left, right = (
        Factor(names[p.weight], p.weight, partial(unit.grouped_view, p), p.heads, projection=p) for p in unit.form(kind)
    )
    name = f"{name}.{kind}" if name else kind
    return Form(name, kind, left, (), right, rotary=unit.rotary and kind == "qk")


def _one_group(factor: Tensor) -> Tensor:  # (long, rank) -> (1, long, rank)
    return factor.unsqueeze(0)  # what ``grouped`` would return, in a fifth of its time
