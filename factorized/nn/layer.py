"""Base class of factorized layers: the cores of a format in the place of a dense weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from factorized._torch import full_precision, is_jit_tracing
from factorized.formats.convolution import Geometry
from factorized.formats.cost import Device, cpu_of
from factorized.formats.format import WAYS, Format, Rank, Step, Way
from factorized.formats.frobenius import decay_in_backward
from factorized.formats.kernel import KernelShape
from factorized.nn.dense import CALL_HOOKS, added_attributes, dense_weight, refuse_dense
from factorized.nn.init import Init, check_init, draw_bias, draw_dense, fill_of
from factorized.nn.weight import owner_of, read_weight

Execution = Literal["auto"] | Way
MACHINES: tuple[tuple[Device, bool], ...] = (  # devices, and whether programs are compiled for them
    *(("cpu", False), ("cpu, channels last", False), ("cpu, fast products", False), ("cuda", False)),
    *(("cpu", True), ("cpu, fast products", True), ("cuda", True)),
)


class Lowered(NamedTuple):
    """A plain layer that computes one step of a format's chain, or shuffles channels between two."""

    layer: nn.Module  # on the meta device
    role: tuple[int, bool] | None = None  # which step's weight it gets, and whether transposed; None: it has no weight
    weight: Tensor | None = None


class FactorizedLayer(nn.Module):
    """A layer whose weight is held in the cores of a format. Abstract.

    ``execution`` selects how it runs: ``"composed"`` forms the weight first, ``"chain"`` applies one thin layer after
    another, ``"products"`` (of convolutions) shifts and stacks between two matrix products; ``"auto"`` takes the
    cheapest by cost. All give the same result.
    """

    bias: nn.Parameter | None
    stride: tuple[int, ...] = ()
    geometry: Geometry | None = None  # of convolutions
    form_kind: str  # what a decay calls its weight
    is_held = False  # whether a larger module holds the weight, as a parameter
    sparse = False  # whether an embedding's gradient is sparse
    tunable = True  # whether there is a choice of ways to run
    takes_more = False  # whether a call takes more than an input, which a chain of plain layers does not
    known_ways: ClassVar[tuple[Way, ...]] = WAYS  # the ways that this kind of layer supports
    made: ClassVar[int] = 0  # layers so far, of all models: a decay sees by it that a model may have got more of them

    def __init__(
        self,
        format: Format,
        execution: Execution = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        FactorizedLayer.made += 1
        self.format = format
        lists: dict[str, nn.ParameterList] = {}
        for name, extents in format.cores.items():
            empty = torch.empty(extents, device=device, dtype=format.core_dtype(name) or dtype)
            core = nn.Parameter(empty, requires_grad=name not in format.frozen)
            holder, _, _ = name.partition(".")
            if holder == name:
                self.register_parameter(name, core)
            elif holder in lists:
                lists[holder].append(core)
            else:
                self.add_module(holder, lists.setdefault(holder, nn.ParameterList([core])))
        self._homes = tuple([name.rpartition(".")[::2] for name in format.cores])  # lists of factors, and names there
        self.drop_connect = 0.0  # share of the product's entries dropped in training, see fz.drop_connect
        self.carried: tuple[str, ...] = ()  # attributes that were set on the dense layer, see ``carry``
        self.dense_class: type[nn.Module] | None = None  # of the layer that it replaced, where that is known
        self.decay_in_backward = 0.0  # added to the gradient of a composed weight, see fz.FrobeniusDecay
        self.execution = execution
        self._find_ways()

    def _find_ways(self) -> None:
        """Store the ways in which this layer can run; a cached property would break a trace that reads it."""
        costs = {
            machine: {w: cost for w, cost in self.format.ways(self.stride, *machine).items() if w in self.known_ways}
            for machine in MACHINES
        }
        self.executions: tuple[Way, ...] = tuple(costs["cpu", False])
        self._cheapest = {machine: min(ways, key=ways.__getitem__) for machine, ways in costs.items()}
        self._settled = self._cheapest["cpu", False] if len({*self._cheapest.values()}) == 1 else None  # linears are
        self.check_execution()

    def change_ranks(self, format: Format, factors: Sequence[nn.Parameter]) -> None:
        """Hold other factors, of the same kind of format at its ranks or others; decays have to be made again."""
        for name, factor in zip(format.cores, factors, strict=True):
            holder, _, place = name.rpartition(".")
            setattr(self.get_submodule(holder), place, factor)
        self.format, self.decay_in_backward = format, 0.0
        self._find_ways()

    @property
    def shape(self) -> KernelShape:
        """The shape of the weight."""
        return self.format.shape

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape in which the dense module holds the weight."""
        return self.shape.weight_shape

    def dense_name(self, name: str) -> str:
        """Return the layer's name in a plan, for the ``name`` of this module."""
        return name

    def factor_name(self, name: str) -> str:
        """Return the name of this module, for the ``name`` that a plan has for the layer."""
        return name

    def weight_key(self, name: str) -> str:
        """Return the name of the weight in a dense state dict, for the ``name`` of this module."""
        return f"{name}.weight".removeprefix(".")

    @property
    def rank(self) -> Rank:
        """The format's rank, or ranks."""
        return self.format.rank

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """Every core, in the order of the format."""
        found: list[Any] = []
        for holder, name in self._homes:
            module = getattr(self, holder) if holder else self
            held = module._parameters  # torch's lookup takes longer; parametrized and sharded factors are attributes
            found.append(held[name] if name in held else getattr(module, name))
        return tuple(found)

    @property
    def weight(self) -> Tensor:
        """The composed weight, in the dense layer's shape: differentiable, and read-only.

        It is formed when one of its values is first needed. Setting it decomposes a tensor into the factors; setting
        it to the weight of another layer of the same format ties the two, as it does for plain layers.
        """
        return read_weight(self, self.format, self.factors)

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        owner = owner_of(weight)
        if owner is None:
            self.set_weight(weight)
        elif isinstance(owner, FactorizedLayer) and owner is not self:
            self.share_factors(owner)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; one called ``weight`` is decomposed, since ``layer.weight = W`` ends up here."""
        if name == "weight" and param is not None:
            self.weight = param.detach()
        else:
            super().register_parameter(name, param)

    @property
    def product(self) -> Tensor:
        """The part of the weight that a decay acts on, by default all of it; differentiable."""
        format, count = self.format.decayed
        return format.compose(self.factors[:count])

    def chosen_execution(self, input: Tensor | None = None) -> Way:
        """Return how ``forward`` runs: the execution set, or for ``"auto"`` the cheapest by cost.

        ``input`` is that of a convolution. On a CPU its size and layout matter, and whose processor it is;
        under a compiler only that, which needs no guard.
        """
        if self.drops or self.decay_in_backward:  # both act on the composed weight
            return "composed"
        if self.execution != "auto":
            self.check_execution()
            return self.execution
        if self._settled is not None:
            return self._settled
        compiled = torch.compiler.is_compiling()
        if input is not None and input.is_cpu and not (compiled or is_jit_tracing()):
            return self._cheapest[cpu_of(input, self.shape.in_channels), False]
        return self._cheapest[cpu_of() if self.factors[0].device.type == "cpu" else "cuda", compiled]

    def check_execution(self) -> None:
        """Raise unless this layer can run in the way that is set."""
        if self.execution != "auto" and self.execution not in self.executions:
            known = self.execution in WAYS
            reason = f"a {self.shape} weight in {self.format.describe()} cannot run this way" if known else "unknown"
            choices = ", ".join(f'"{way}"' for way in ("auto", *self.executions))
            raise ValueError(f"execution must be one of {choices}, got {self.execution!r} ({reason})")

    @property
    def composes(self) -> bool:
        """Whether ``forward`` composes the product, so that λ times it can be added in the backward pass."""
        return self.chosen_execution() == "composed"

    @property
    def drops(self) -> bool:
        """Whether ``forward`` drops entries of the product, which it then has to form."""
        return self.training and self.drop_connect > 0

    @property
    def adjust(self) -> Callable[[Tensor], Tensor] | None:
        """A function applied to the composed product before use: it drops entries, or adds λW to the gradient."""
        return self._adjusted if self.drops or self.decay_in_backward else None

    def _adjusted(self, weight: Tensor) -> Tensor:
        if self.decay_in_backward:
            weight = decay_in_backward(weight, self.decay_in_backward)
        return F.dropout(weight, self.drop_connect) if self.drops else weight

    @abstractmethod
    def dense_skeleton(self) -> nn.Module:
        """Return a dense layer with this layer's settings on the meta device, weight and bias still to be given."""

    @abstractmethod
    def lowered(self) -> list[Lowered]:
        """Return the format's chain as plain layers; empty where it has none, or has no fewer weights."""

    @property
    def why_composed(self) -> str:
        """Why ``lowered`` is empty, for a message."""
        return f"no smaller plain layers compute a {self.format.name}"

    def worthwhile(self, plain: list[tuple[Step, Tensor]]) -> list[tuple[Step, Tensor]]:
        """Return the chain, or an empty list if it has no fewer weights than the dense layer."""
        return plain if sum(weight.numel() for _, weight in plain) < self.shape.numel else []

    @abstractmethod
    def settings_repr(self) -> list[str]:
        """Return what the dense layer's repr would show."""

    @full_precision
    def to_dense(self) -> nn.Module:
        """Return the plain ``torch.nn`` layer that computes the same, sharing nothing with this one."""
        dense = self.dense_skeleton()
        trains = any(factor.requires_grad for factor in self.factors)
        dense.weight = nn.Parameter(self.weight.detach().clone(memory_format=torch.contiguous_format), trains)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return dense.train(self.training)

    def reset_parameters(self, init: Init = "spectral") -> None:
        """Fill the factors again, ``"spectral"`` from a fresh dense initialization, and the bias as torch does."""
        check_init(init)
        if self.factors[0].is_meta:
            return
        if init == "spectral":
            self.set_weight(self.draw_dense_weight())
        else:
            self.draw_factors(init)
        draw_bias(self.bias, fan_in=prod(self.shape.weight_shape[1:]))

    @full_precision
    @torch.no_grad()
    def set_weight(
        self,
        weight: Tensor,  # (out, in/groups, *size)
    ) -> None:
        """Make the product the best approximation of ``weight`` at this rank (section 3.1)."""
        self._check_weight(weight)
        self.set_factors(*self.format.decompose(weight))

    def _check_weight(self, weight: Tensor) -> None:
        """Raise unless the factors can be set from ``weight``."""
        if not isinstance(weight, Tensor):
            raise ValueError(f"weight must be a tensor, got {type(weight).__name__}; nothing was changed")
        if not weight.is_floating_point():
            got = str(weight.dtype).removeprefix("torch.")
            raise ValueError(f"weight must be floating point, got {got}; nothing was changed")
        if tuple(weight.shape) != self.shape.weight_shape:
            expected, got = ("x".join(map(str, extents)) for extents in (self.dense_shape, weight.shape))
            raise ValueError(f"weight must be {expected} for this layer, got {got}; nothing was changed")
        if any(isinstance(factor, DTensor) for factor in self.factors):
            raise ValueError(
                "the factors are sharded over processes and cannot be set as a whole; do this before fully_shard"
            )
        if weight.is_meta or self.factors[0].is_meta:
            which = "weight is" if weight.is_meta else "the factors are"
            raise ValueError(f"{which} on the meta device, without values; materialize it first with to_empty")
        if not torch.isfinite(weight).all():
            raise ValueError("weight holds NaN or infinity; nothing was changed")
        self.check_settable()

    def check_settable(self) -> None:
        """Raise if a factor is computed from other parameters, so that a value it is given would be lost."""
        for name, factor in zip(self.format.cores, self.factors, strict=True):
            if not isinstance(factor, nn.Parameter):
                raise ValueError(
                    f"{name} cannot be set, because a parametrization, a weight norm, pruning or FSDP1 computes it. "
                    "Make it a parameter again first, with torch.nn.utils.parametrize.remove_parametrizations, "
                    "remove_weight_norm or prune.remove; nothing was changed"
                )

    @torch.no_grad()
    def set_factors(self, *factors: Tensor) -> None:
        """Copy factors in."""
        for own, value in zip(self.factors, factors, strict=True):
            own.copy_(value)

    def draw_factors(self, init: Init) -> None:
        """Draw the factors at random."""
        self.check_settable()
        self.format.draw([factor.detach() for factor in self.factors], fill_of(init, self.shape))

    def share_factors(self, other: FactorizedLayer) -> None:
        """Share the factors of ``other``, which must have the same format."""
        if other.format != self.format:
            own, others = self.format.describe(), other.format.describe()
            raise ValueError(
                f"a {self.shape} weight ({own}) cannot be tied to a {other.shape} one ({others}); to copy the values, "
                "set layer.weight = other.weight.clone()"
            )
        self.check_settable()
        other.check_settable()
        self.change_ranks(self.format, other.factors)

    @torch.no_grad()
    def draw_dense_weight(self) -> Tensor:  # (out, in/groups, *size)
        """Draw the weight that a fresh dense layer of this kind would have."""
        factor = self.factors[0]
        weight = torch.empty(self.shape.weight_shape, device=factor.device, dtype=factor.dtype)
        draw_dense(weight)
        return weight

    def take_over(self, dense: nn.Module, init: Init | None) -> None:
        """Fill the factors from ``dense.weight`` as ``init`` says; copy its bias, its mode and ``requires_grad``.

        ``init=None`` leaves the factors unfilled.
        """
        weight = dense_weight(dense)
        if init is not None:
            check_init(init)
            if init == "spectral" and not weight.is_meta:
                self.set_weight(weight)
            elif not weight.is_meta:
                self.draw_factors(init)
        for name, factor in zip(self.format.cores, self.factors, strict=True):
            factor.requires_grad_(weight.requires_grad and name not in self.format.frozen)
        bias = getattr(dense, "bias", None)
        if bias is not None and self.bias is not None:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.train(dense.training)

    def carry(self, dense: nn.Module) -> None:
        """Copy the attributes set on a dense layer, and those set on its weight to every factor."""
        self.dense_class = type(dense)
        added = added_attributes(dense, self.dense_skeleton())
        taken = sorted(name for name in added if hasattr(self, name))
        if taken:
            raise ValueError(
                f"its attribute {taken[0]!r} has the same name as one of {type(self).__name__}; rename it. Nothing "
                "was changed"
            )
        for name, value in added.items():
            setattr(self, name, value)
        self.carried = tuple(added)
        for factor in self.factors:
            vars(factor).update(vars(dense.weight))

    def hand_back(self, plain: nn.Module) -> None:
        """Give the module that replaces this layer the dense layer's class and attributes, and this layer's hooks."""
        if self.dense_class is not None and issubclass(self.dense_class, type(plain)):
            plain.__class__ = self.dense_class  # it computes the same, see ``plain_class``
        for name in self.carried:
            setattr(plain, name, getattr(self, name))
        for name in CALL_HOOKS:
            plain.__dict__[name] = self.__dict__[name]

    def hand_over(self, other: FactorizedLayer) -> None:
        """Give another factorized layer, which replaces this one, all that is not part of its weight."""
        self.hand_back(other)
        other.carried, other.dense_class = self.carried, self.dense_class
        other.execution, other.drop_connect = self.execution, self.drop_connect

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        refuse_dense([self.weight_key(prefix.removesuffix("."))], state_dict, errors=others[-1])

    def extra_repr(self) -> str:
        """Show the dense layer's settings, how it runs, the format and the parameters saved."""
        used = sum(factor.numel() for factor in self.factors)
        saved = f"params={used:,} of {self.shape.numel:,}"
        return ", ".join([*self.settings_repr(), f"execution={self.chosen_execution()}", self.format.describe(), saved])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, to which no decay is attached."""
        return {**self.__dict__, "decay_in_backward": 0.0}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line: nn.Module would list the factors too
