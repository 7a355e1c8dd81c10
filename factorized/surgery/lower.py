"""``fz.lower``: a factorized model as plain ``torch.nn`` modules that are still low-rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from factorized._checks import warn
from factorized.attention.resize import lowered_module, plain_size
from factorized.attention.unit import AttentionUnit
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model, listed, module_names
from factorized.nn.running import ExampleInput, count_parameters, removing, run_once
from factorized.surgery.compose import SharedWeights, convert, dense_layer
from factorized.surgery.heads import plain_attention, shrunk_attention
from factorized.surgery.reads import called_with_more, weights_read

Reasons = dict[str, str]


def lower(
    model: Model,
    *,
    exclude: Sequence[str] = (),
    example_input: ExampleInput | None = None,
    allow_nonfinite: bool = False,
) -> Model:
    """Return a copy of ``model`` whose low-rank layers are pairs of plain layers in ``nn.Sequential``.

    A pair is two linears, two convolutions, or a narrow embedding and a linear; inner matrices are multiplied into a
    factor. A layer whose pair would be larger than its dense weight (overcomplete ones) is composed instead. A tensor
    train gives two plain layers, a Tucker tensor three (1×1, k×k, 1×1), and a separable convolution also its depthwise
    layer; a tensor whose dimensions mix outputs and inputs is composed. Heads of shrunk attention keep their sizes,
    padded by plain layers where their class has one size for all; ``nn.MultiheadAttention`` gets its dense head size
    back. A tied embedding and output layer keep sharing ``U``; ``V`` is copied, because one of them transposes it.

    A pair has the settings of its dense layer (``in_features``, ``stride``) as attributes, but no ``weight``, and takes
    no ``output_size``. So layers whose weight the model's own code reads, and transposed convolutions that it calls
    with an ``output_size``, are composed. They are found in the source of the model's classes or, with
    ``example_input``, by a run. Torch's encoder reads weights on its fast paths, which are disabled; as in training,
    its output at padded positions is then not zero. A warning names every layer that is composed although its factors
    are smaller, and attention that grows, with the reason.

    Args:
        model: a factorized model; it is not changed.
        exclude: names or globs of layers and attention modules to compose, or of containers of them.
        example_input: what the model's forward takes; the lowered model is run on it once.
        allow_nonfinite: also convert weights that are not finite, instead of raising.

    Raises:
        ValueError: the model has no factorized layer, is sharded over processes or has weights that are not finite;
            a pattern of ``exclude`` matches nothing; or the lowered model does not run on ``example_input``.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedConv2d(16, 32, 3, 8, padding=1))
        >>> fz.lower(model)[0]
        Sequential(
          (0): Conv2d(16, 8, kernel_size=(1, 3), stride=(1, 1), padding=(0, 1), bias=False)
          (1): Conv2d(8, 32, kernel_size=(3, 1), stride=(1, 1), padding=(1, 0))
        )
    """
    check_model(model)
    composed = _excluded(model, exclude)
    read = weights_read(model, _places(model))
    if example_input is None:
        composed |= {
            name: "the model's code reads its weight; pass example_input= to check by a run whether it does so here"
            for name, what in read.items()
            if "" in what
        }
        layers = {name: model.get_submodule(name) for name in _places(model)}
        taking = [name for name, layer in layers.items() if isinstance(layer, FactorizedLayer) and layer.takes_more]
        composed |= dict.fromkeys(
            called_with_more(model, taking),
            "the model's code gives it an output_size; pass example_input= to check by a run whether it does so here",
        )
    while True:
        lowering = _Lowering(model, composed, read)
        lowered = convert(model, lowering.layer, lowering.attention, allow_nonfinite=allow_nonfinite)
        _keep_off_fast_paths(lowered)
        found = lowering.asked_of(lowered, example_input) if example_input is not None else {}
        if not found:
            break
        composed |= found
    if lowering.grown:
        warn(
            f"lowered, {type(model).__name__} has {count_parameters(lowered):,} parameters, more than the factorized "
            f"{count_parameters(model):,}: {listed(lowering.grown, 3, '; ')}",
        )
    return lowered


class _Lowering:
    """How each layer of a model is lowered, and which of them grow back to their dense size."""

    def __init__(self, model: nn.Module, composed: Reasons, read: dict[str, set[str]]) -> None:
        self.model, self.composed, self.read = model, composed, read
        self.grown: list[str] = []
        self._counted: set[nn.Parameter] = set()
        # Layers that share factors are composed together: else the model would hold the dense weight and the pair.
        modules = model.named_modules(remove_duplicate=False)
        factors = {name: layer.factors for name, layer in modules if isinstance(layer, FactorizedLayer)}
        reasons = {factors[name]: reason for name, reason in composed.items() if name in factors}
        self._reasons = {name: reasons[held] for name, held in factors.items() if held in reasons}
        self._chains: dict[str, nn.Sequential] = {}

    def layer(self, names: list[str], layer: FactorizedLayer, shared: SharedWeights) -> nn.Module:
        """Return the chain of a layer, or its dense layer."""
        reason = next((self._reasons[name] for name in names if name in self._reasons), None)
        chain = [] if reason is not None else layer.lowered()
        if not chain:
            plain = dense_layer(layer, shared)
            before = self._count(layer.factors)
            after = self._count(parameter for parameter in plain.parameters() if parameter is not layer.bias)
            self._note(names[0], before, after, reason or layer.why_composed)
            return plain
        for part, role, weight in chain:
            if weight is not None:
                part.weight = shared.parameter(layer, role, weight)
        last = chain[-1].layer
        if layer.bias is not None:
            last.bias = layer.bias
        sequence = nn.Sequential(*(part.layer for part in chain)).train(layer.training)
        _describe(sequence, layer.dense_skeleton())
        read = {what for name in names for what in self.read.get(name, ())}
        if read and "" not in read:  # only its type or device, which every factor has
            sequence.__dict__["weight"] = last.weight  # not registered: it is a parameter already
        self._chains[names[0]] = sequence
        return sequence

    def attention(self, names: list[str], unit: AttentionUnit) -> nn.Module:
        """Return a plain module with the unit's head sizes, or the smallest that its class can hold."""
        reason = next((self.composed[name] for name in names if name in self.composed), None)
        inside = [f"{name}.{projection.path}".strip(".") for name in names for projection in unit.projections]
        plain = None if reason is not None or weights_read(self.model, inside) else lowered_module(unit)
        if plain is None:
            plain = plain_attention(unit, plain_size(unit) if reason is None else unit.head_size)
        reason = reason or f"{type(plain).__name__} has one head size for queries and values"
        self._note(names[0], count_parameters(unit.module), count_parameters(plain), reason)
        return plain

    def asked_of(self, lowered: nn.Module, example_input: ExampleInput) -> Reasons:
        """Run the lowered model; if it asks of a chain what only the layer has, return all layers like it."""
        refused: list[nn.Module] = []  # chains that were given more than an input

        def note(chain: nn.Module, inputs: Any, keywords: Any) -> None:
            if len(inputs) + len(keywords) > 1:
                refused.append(chain)

        try:
            with removing([c.register_forward_pre_hook(note, with_kwargs=True) for c in self._chains.values()]):
                run_once(lowered, example_input)
        except ValueError as error:
            cause = error.__cause__
            asked, why = (cause.obj, f"reads its {cause.name}") if isinstance(cause, AttributeError) else (None, "")
            if refused:
                asked, why = refused[0], "gives it an output_size"
            place = next((name for name, chain in self._chains.items() if chain is asked), None)
            if place is None:
                run_once(self.model, example_input)  # raises if it is the input that does not fit
                raise ValueError(
                    f"the lowered model does not run on example_input: {cause}. Name the layers that it cannot use "
                    "as pairs in exclude=, or use fz.compose"
                ) from error
            owner, child = _owner(self.model, place)
            like = [name for name in self._chains if _owner(self.model, name) == (owner, child)]
            return dict.fromkeys(like, f"{owner.__name__} {why}")
        return {}

    def _note(self, name: str, before: int, after: int, reason: str) -> None:
        if after > before:
            self.grown.append(f"{name or 'the model'} {before:,} → {after:,} ({reason})")

    def _count(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the entries of those parameters that were not counted before, because tied layers share them."""
        new = {parameter for parameter in parameters if parameter not in self._counted}
        self._counted |= new
        return sum(parameter.numel() for parameter in new)


def _describe(sequence: nn.Sequential, dense: nn.Module) -> None:
    """Set the attributes of the layer that a sequence replaces: sizes, stride, padding."""
    known = vars(nn.Sequential())
    for name, value in vars(dense).items():
        if name not in known and not name.startswith("_"):
            setattr(sequence, name, value)


def _places(model: nn.Module) -> list[str]:
    """Return all names of factorized layers and of shrunk attention modules."""
    units = {unit.module for unit in shrunk_attention(model)}
    return [
        name
        for module, names in module_names(model).items()
        if isinstance(module, FactorizedLayer) or module in units
        for name in names
    ]


def _excluded(model: nn.Module, exclude: Sequence[str]) -> Reasons:
    if isinstance(exclude, str) or not all(isinstance(pattern, str) for pattern in exclude):
        raise ValueError(f"exclude must be a list of names or globs, got {exclude!r}")
    places = _places(model)
    reasons: Reasons = {}
    for pattern in exclude:
        matched = [name for name in places if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not matched:
            raise ValueError(
                f"exclude={pattern!r} matches no factorized layer of {type(model).__name__}; they include "
                f"{', '.join(map(repr, places[:3]))}"
            )
        reasons |= dict.fromkeys(matched, "in exclude=")
    return reasons


def _owner(model: nn.Module, place: str) -> tuple[type[nn.Module], str]:
    parent, _, child = place.rpartition(".")
    return type(model.get_submodule(parent)), child


def _keep_off_fast_paths(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_pair(module):
            module.activation_relu_or_gelu = 0  # torch's switch that disables the fast path
        elif isinstance(module, nn.TransformerEncoder) and _has_pair(module.layers[0]):
            module.use_nested_tensor = False  # the same for the whole encoder, which checks its first layer


def _has_pair(encoder_layer: nn.Module) -> bool:
    linears = [getattr(encoder_layer, name, None) for name in ("linear1", "linear2")]
    return any(isinstance(linear, nn.Sequential) for linear in linears)
