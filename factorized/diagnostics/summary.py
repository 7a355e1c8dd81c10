"""``fz.summary``: a table of a model's layers, factorized or dense, and their parameters."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from factorized.attention.register import find_attention
from factorized.decay.forms import forms
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import check_model
from factorized.nn.running import count_parameters
from factorized.planning.table import fitting, joined, short_count
from factorized.surgery.heads import attention_entries

HEADINGS = ("layer", "type", "shape", "heads", "format", "rank", "runs", "decay", "params", "dense", "share")
NUMBERS = ("rank", "params", "dense", "share")
FIRST_TO_GO = ("runs", "type", "decay", "dense", "shape")  # columns dropped, in this order, in a narrow terminal


@dataclass(frozen=True)
class SummaryRow:
    """One layer of a model, and its parameters."""

    name: str
    type: str
    shape: tuple[int, ...]  # of its weight
    params: int  # those of no earlier row, including the bias
    dense_params: int  # the same for the dense layer that it replaces
    format: str = ""  # empty for a dense layer
    rank: str = ""
    execution: str = ""  # how it runs
    decay: str = ""  # which forms a decay finds in it, see fz.forms
    heads: str = ""  # for attention: number and size


@dataclass(frozen=True)
class Summary:
    """The layers of a model with their totals; ``print`` it, or let a notebook show it.

    Attributes:
        model: the model's class.
        rows: a row for every layer, with its ``name``, ``type``, ``shape``, ``params``, ``dense_params``, ``format``,
            ``rank``, ``execution``, ``decay`` and ``heads``; the last five are empty where a layer has none.
        params: the parameters of the whole model.
        dense_params: those of the dense model that it replaces.
        trained: the parameters that are not frozen.

    Examples:
        >>> table = fz.summary(nn.Sequential(fz.FactorizedLinear(64, 64, 8)))
        >>> table.params, table.dense_params, table.rows[0].rank
        (1088, 4160, '8')
    """

    model: str
    rows: tuple[SummaryRow, ...]
    params: int
    dense_params: int
    trained: int

    def __str__(self) -> str:
        cells = self._cells()
        columns = zip(HEADINGS, zip(*cells, strict=True), strict=True)
        widths = {heading: max(map(len, (heading, *column))) for heading, column in columns if any(column)}
        widths = fitting(widths, FIRST_TO_GO, shutil.get_terminal_size((120, 24)).columns)
        rows = [dict(zip(HEADINGS, row, strict=True)) for row in (HEADINGS, *cells)]
        lines = [joined(row, widths, NUMBERS).rstrip() for row in rows]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], self._totals()])

    def _repr_html_(self) -> str:
        """Return the table for a notebook, which styles it."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(row(cells, "td") for cells in self._cells())
        return f"<table>\n{row(HEADINGS, 'th')}\n{body}\n</table>\n<p>{escape(self._totals())}</p>"

    def _cells(self) -> list[tuple[str, ...]]:
        """Return all rows as text: layers, everything else, the total."""
        rest = self.params - sum(row.params for row in self.rows)
        found: list[tuple[str, ...]] = [
            (
                row.name or "(model)",
                row.type,
                "x".join(map(str, row.shape)),
                row.heads,
                row.format,
                row.rank,
                row.execution,
                row.decay,
                short_count(row.params) if row.params else "shared",
                short_count(row.dense_params) if row.dense_params != row.params else "",
                self._share(row.params),
            )
            for row in self.rows
        ]
        blank = ("",) * (len(HEADINGS) - 4)
        dense = short_count(self.dense_params) if self.dense_params != self.params else ""
        if rest:
            found.append(("everything else", *blank, short_count(rest), "", self._share(rest)))
        return [*found, ("total", *blank, short_count(self.params), dense, self._share(self.params))]

    def _share(self, params: int) -> str:
        return f"{params / self.params:.1%}" if params else ""

    def _totals(self) -> str:
        factorized = sum(bool(row.format) for row in self.rows)
        smaller = self.params != self.dense_params
        of = f", {self.params / self.dense_params:.4f} of the dense {self.dense_params:,}" if smaller else ""
        return (
            f"{self.model}: {factorized} of {len(self.rows)} layers factorized, {self.params:,} parameters{of}; "
            f"{self.trained:,} are trained"
        )


def summary(model: nn.Module) -> Summary:
    """Return a table of every layer of ``model`` that has a weight matrix, factorized or not.

    A row shows type, shape, format and rank, how the layer runs, which forms a decay finds in it, the heads it serves
    in attention, and its parameters now and dense. Norms and biases of other modules count as everything else;
    parameters of an earlier row are shown as shared.

    Raises:
        ValueError: ``model`` is not an ``nn.Module``.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), nn.Linear(64, 10))
        >>> print(fz.summary(model))
        layer  type              shape  format   rank  runs   decay   params  dense   share
        -----------------------------------------------------------------------------------
        0      FactorizedLinear  64x64  product     8  chain  linear   1,088  4,160   62.6%
        1      Linear            10x64                                   650          37.4%
        -----------------------------------------------------------------------------------
        total                                                          1,738  4,810  100.0%
        Sequential: 1 of 2 layers factorized, 1,738 parameters, 0.3613 of the dense 4,810; 1,738 are trained
    """
    check_model(model)
    heads, decayed = _heads(model), _decayed(model)
    inside = {part for layer in _layers(model) for part in layer.modules() if part is not layer}
    counted: set[Tensor] = set()
    rows = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(isinstance(module, FactorizedLayer)) if not is_lazy(p)]
        if module in inside or not any(p.dim() > 1 for p in own):
            continue
        new = [p for p in own if p not in counted]
        counted.update(new)
        rows.append(_row(name, module, own, new, heads, decayed))
    params = count_parameters(model)
    saved = sum(row.dense_params - row.params for row in rows)
    saved += sum(entry.params - entry.params_after for entry in attention_entries(model, str))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad and not is_lazy(p))
    return Summary(type(model).__name__, tuple(rows), params, params + saved, trained)


def _row(
    name: str,
    module: nn.Module,
    own: Sequence[nn.Parameter],
    new: Sequence[nn.Parameter],  # those that no earlier row holds
    heads: dict[Tensor, list[str]],
    decayed: dict[Tensor, list[str]],
) -> SummaryRow:
    params = sum(p.numel() for p in new)
    texts = [", ".join(dict.fromkeys(t for p in own for t in found.get(p, []))) for found in (decayed, heads)]
    if not isinstance(module, FactorizedLayer):
        largest = max(own, key=lambda p: p.numel())
        return SummaryRow(
            name, type(module).__name__, tuple(largest.shape), params, params, decay=texts[0], heads=texts[1]
        )
    weight = module.shape.numel
    holds = any(factor is parameter for factor in module.factors for parameter in new)
    return SummaryRow(
        name,
        type(module).__name__,
        module.dense_shape,
        params,
        params + (weight - module.format.numel if holds else 0),
        module.format.name,
        "x".join(map(str, module.format.ranks)),
        module.chosen_execution(),
        *texts,
    )


def _layers(model: nn.Module) -> list[FactorizedLayer]:
    return [module for module in model.modules() if isinstance(module, FactorizedLayer)]


def _heads(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return the heads that each attention weight serves, as text."""
    found: dict[Tensor, list[str]] = {}
    for read in find_attention(model):
        for projection in () if read.unit is None else read.unit.projections:
            dense = read.unit.head_size if read.unit is not None else 0
            of = f" of {dense}" if projection.head_size != dense else ""
            found.setdefault(projection.weight, []).append(f"{projection.heads}x{projection.head_size}{of}")
    return found


def _decayed(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return the kinds of the forms that each parameter is a factor of."""
    try:
        found = forms(model)
    except ValueError:  # factors that pruning or a parametrization computes cannot be decayed
        return {}
    kinds: dict[Tensor, list[str]] = {}
    for form in found:
        for factor in form.factors:
            kinds.setdefault(factor.parameter, []).append(form.kind)
    return kinds
