"""``fz.forms``: every product in a model, whichever modules hold its factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from factorized.attention.register import find_attention
from factorized.attention.unit import FORMS, AttentionUnit, FormName, Projection
from factorized.decay.local import check_placements, projection_part
from factorized.formats.format import Format
from factorized.formats.frobenius import compose, frobenius_gradients, frobenius_norm_squared
from factorized.formats.kernel import grouped, to_matrix
from factorized.formats.svd import factor_spectrum
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import check_model, dotted


@dataclass(frozen=True, eq=False)
class Factor:
    """A parameter, or a part of one, that is a factor of a product; batched over groups or heads."""

    name: str  # of the parameter, in the model
    parameter: nn.Parameter
    view: Callable[[Tensor], Tensor]  # a tensor shaped like the parameter -> its view (batch, long, rank), or a core
    holder: nn.Module  # holds the parameter
    attribute: str  # under this name
    batch: int = 1  # groups or heads
    projection: Projection | None = None  # of attention: which part of the parameter it is

    @property
    def value(self) -> Tensor:
        """The factor's current value, without gradient history; for a sharded one, the rows that this rank has."""
        return self.part(self.parameter.detach())

    @property
    def is_whole(self) -> bool:
        """Whether the factor is its parameter itself, so that no view of it is needed."""
        return self.batch == 1 and self.view is _one_group and not isinstance(self.parameter, DTensor)

    @property
    def place(self) -> tuple[nn.Parameter, int, int]:
        """The parameter, and where the factor begins in it: equal for factors of several forms that are the same."""
        part = self.projection
        return (self.parameter, 0, 0) if part is None else (self.parameter, part.dim, part.start)

    @property
    def is_held(self) -> bool:
        """Whether the module still holds the parameter, which may have been pruned, parametrized or replaced."""
        return self.holder._parameters.get(self.attribute) is self.parameter

    def part(self, tensor: Tensor) -> Tensor:
        """Return the factor's part of a tensor shaped like its parameter, such as the gradient, to be changed in place.

        It is (batch, long, rank), or for a sharded tensor its local part in two dimensions, with groups or heads not
        separated.
        """
        if not isinstance(tensor, DTensor):
            return self.view(tensor)
        local = tensor.to_local()
        return local if self.projection is None else projection_part(self.projection, local, tensor)

    @property
    def differentiable(self) -> Tensor:
        """The factor with its gradient history; a sharded one is gathered where groups or heads cross its shards."""
        crosses = self.projection is not None or self.batch > 1
        return self.whole if crosses else self.view(self.parameter)

    @property
    def whole(self) -> Tensor:
        """The factor with its gradient history; a sharded one is gathered, so all ranks must read it."""
        parameter: Tensor = self.parameter
        return self.view(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


@dataclass(frozen=True, eq=False)
class Form:
    """A weight that is decayed as a whole: of a factorized layer, or of all heads of an attention form.

    A product ``U M₁…M_d Vᵀ`` is batched over groups or heads. In attention, ``"qk"`` is ``Q_h K_hᵀ`` and ``"ov"`` is
    ``V_h O_hᵀ``. Where query heads share a K/V head, the batch is (K/V heads, query heads of each), with 1 in the
    second place for the shared matrix. For other formats the factors are their cores; for a separable convolution,
    those of its pointwise part.

    Attributes:
        name: the dotted name of its module; for attention with the kind, such as ``"encoder.0.self_attn.ov"``.
        kind: ``"linear"``, ``"conv"``, ``"embedding"``, ``"recurrent"``, ``"experts"``, ``"qk"`` or ``"ov"``.
        factors: the factors in the order of the product, or of the format.
        format: the layer's format; None for attention, which is a product.
        layer: the factorized layer that holds the whole product, if one does.
        rotary: whether queries and keys are rotated by position, so that a ``"qk"`` is not one bilinear form.

    Examples:
        >>> form = fz.forms(nn.Sequential(fz.FactorizedLinear(64, 32, 8)))[0]
        >>> form.name, form.kind, form.numel
        ('0', 'linear', 2048)
        >>> torch.allclose(form.norm_squared(form.values), (form.U @ form.V.mT).square().sum())
        True
    """

    name: str
    kind: str
    factors: tuple[Factor, ...] = field(repr=False)
    format: Format | None = None
    layer: FactorizedLayer | None = field(default=None, repr=False)
    rotary: bool = False

    @property
    def is_product(self) -> bool:
        """Whether the factors are ``U``, inner matrices and ``V``."""
        return self.format is None or self.format.is_product

    @property
    def left(self) -> Factor:
        """The factor ``U`` of a product."""
        return self.factors[0]

    @property
    def middle(self) -> tuple[Factor, ...]:
        """The factors between ``U`` and ``V`` of a product."""
        return self.factors[1:-1]

    @property
    def right(self) -> Factor:
        """The factor ``V`` of a product."""
        return self.factors[-1]

    @property
    def U(self) -> Tensor:  # (batch, m, rank)
        """The left factor of a product, differentiable."""
        return self.left.differentiable

    @property
    def V(self) -> Tensor:  # (batch, n, rank)
        """The right factor of a product, differentiable."""
        return self.right.differentiable

    @property
    def inner(self) -> tuple[Tensor, ...]:  # each (batch, rank, rank)
        """The matrices between them, differentiable."""
        return tuple(factor.differentiable for factor in self.middle)

    @property
    def numel(self) -> int:
        """Entries of the weight."""
        if self.format is not None:
            return self.format.shape.numel
        batch = torch.broadcast_shapes(self.U.shape[:-2], self.V.shape[:-2])
        return batch.numel() * self.U.shape[-2] * self.V.shape[-2]

    @property
    def values(self) -> list[Tensor]:
        """All factors in order, differentiable; sharded ones are gathered, so all ranks must read them."""
        return [factor.whole for factor in self.factors]

    def compose(self, values: Sequence[Tensor]) -> Tensor:  # (batch, m, n)
        """Return the weight of ``values``, given in place of the factors, as the matrices that low rank reads it as."""
        if self.format is None or self.format.is_product:
            return compose(values[0], values[-1], values[1:-1]).flatten(0, -3)
        return to_matrix(self.format.compose(values), self.format.shape)

    def norm_squared(self, values: Sequence[Tensor]) -> Tensor:  # (batch,), or () if it is not a product
        """Return the squared Frobenius norm of the weight of ``values``, given in place of the factors."""
        if self.format is None or self.format.is_product:
            return frobenius_norm_squared(values[0], values[-1], values[1:-1])
        return self.format.norm_squared(values)

    def gradients(self, values: Sequence[Tensor]) -> list[Tensor]:  # like values
        """Return the gradients of half the squared norm; ``values`` of a format may have a leading batch dimension."""
        if self.format is None or self.format.is_product:
            dU, dV, d_inner = frobenius_gradients(values[0], values[-1], values[1:-1])
            return [dU, *d_inner, dV]
        return list(self.format.gradients(values))

    def spectrum(self, values: Sequence[Tensor]) -> Tensor:  # (batch, singular values)
        """Return the singular values of the weight of ``values``; a product is not formed."""
        if self.is_product:
            return factor_spectrum(values[0], values[-1], values[1:-1])
        return torch.linalg.svdvals(self.compose(values))


Names = Mapping[Tensor, str]  # of parameters


def forms(model: nn.Module) -> list[Form]:
    """Return every product in ``model``, each once, however many layers are tied to its factors.

    A factorized layer is one form. An attention module is two products, of the kinds ``"qk"`` and ``"ov"``, if
    an adapter can read it: see ``fz.register_attention``.

    Raises:
        ValueError: a factor is not a parameter of the model, because a parametrization or pruning computes it, or the
            factors of one product are not distributed over the same ranks.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 32, 8), nn.MultiheadAttention(32, 4))
        >>> [(form.name, form.kind, tuple(form.U.shape)) for form in fz.forms(model)]
        [('0', 'linear', (1, 32, 8)), ('1.qk', 'qk', (4, 32, 8)), ('1.ov', 'ov', (4, 32, 8))]
    """
    check_model(model)
    found: dict[tuple[object, ...], Form] = {}
    names: Names = {parameter: name for name, parameter in model.named_parameters()}
    attention = {read.module: read.unit for read in find_attention(model)}
    for name, module in model.named_modules():
        if isinstance(module, FactorizedLayer):
            found.setdefault(module.factors, _layer_form(name, module, names))
        unit = attention.get(module)
        if unit is None:
            continue
        for kind in FORMS:
            identity = [part for p in unit.form(kind) for part in (p.weight, p.start)]
            found.setdefault((kind, *identity), _attention_form(name, unit, kind, names))
    for form in found.values():
        check_placements({factor.name: factor.parameter for factor in form.factors})
    return list(found.values())


def why_none(model: nn.Module) -> str:
    """Return a sentence for the end of an error, on why ``model`` has no forms; or an empty one."""
    read = next((read for read in find_attention(model) if read.unit is None), None)
    if read is not None:
        return f". Its attention {read.name or 'itself'!r} cannot be read: {read.reason}"
    if any(isinstance(module, GraphModule) for module in model.modules()):
        return ". It was traced, which leaves no layers: pass the model that was traced, whose parameters it has"
    return ""


def check_have_values(found: Sequence[Form]) -> None:
    """Raise if a factor is on the meta device."""
    for factor in (factor for form in found for factor in form.factors):
        if factor.parameter.is_meta:
            raise ValueError(f"{factor.name} is on the meta device and has no values; load the weights first")


def is_attention(form: Form) -> bool:
    """Return whether a form belongs to attention."""
    return form.kind in FORMS


def factor_parameters(found: Sequence[Form]) -> dict[nn.Parameter, Form]:
    """Return every parameter that holds a factor, with the (first) form it belongs to."""
    owners: dict[nn.Parameter, Form] = {}
    for form in found:
        for factor in form.factors:
            owners.setdefault(factor.parameter, form)
    return owners


def _layer_form(name: str, layer: FactorizedLayer, names: Names) -> Form:
    format, count = layer.format.decayed
    factors = dict(zip(layer.format.cores, layer.factors[:count], strict=False))
    _check_parameters(name, factors, names)
    groups = format.shape.groups if format.is_product else 1
    view = _as_it_is if not format.is_product else partial(grouped, groups=groups) if groups > 1 else _one_group
    parts = []
    for core, parameter in factors.items():
        path, _, attribute = core.rpartition(".")  # inner matrices are in a list
        parts.append(Factor(names[parameter], parameter, view, layer.get_submodule(path), attribute, groups))
    return Form(name, layer.form_kind, tuple(parts), format, layer)


def _check_parameters(name: str, factors: Mapping[str, Tensor], names: Names) -> None:
    """Raise unless the factors of a layer, by their names in it, are parameters: only those can be decayed."""
    for part, factor in factors.items():
        if factor not in names:
            raise ValueError(
                f"{f'{name}.{part}'.lstrip('.')} is not a parameter of the model: a parametrization, a weight norm, "
                "pruning or FSDP1 computes it, and a gradient of the product cannot be added to it. Make it a "
                "parameter again, with torch.nn.utils.parametrize.remove_parametrizations or "
                "torch.nn.utils.prune.remove, or leave this layer dense"
            )


def _as_it_is(core: Tensor) -> Tensor:
    return core


def _attention_form(name: str, unit: AttentionUnit, kind: FormName, names: Names) -> Form:
    parts = []
    for p in unit.form(kind):
        holder = unit.module.get_submodule(p.path)
        attribute = next(name for name, held in holder._parameters.items() if held is p.weight)
        view = partial(unit.grouped_view, p)
        parts.append(Factor(names[p.weight], p.weight, view, holder, attribute, p.heads, projection=p))
    return Form(dotted(name, kind), kind, tuple(parts), rotary=unit.rotary and kind == "qk")


def _one_group(factor: Tensor) -> Tensor:  # (long, rank) -> (1, long, rank)
    return factor.unsqueeze(0)  # the same as ``grouped``, five times faster
