"""A linear layer whose weight is held in a format."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from factorized.formats.format import Format
from factorized.nn.dense import check_dense, dense_weight, format_of
from factorized.nn.init import Init
from factorized.nn.layer import Execution, FactorizedLayer, Lowered
from factorized.nn.recorded import recorded_call


class FactorizedLinear(FactorizedLayer):
    """``y = x Wᵀ + b`` with ``W`` in a format: a product of the given rank, or any ``Format`` for (out, in).

    Args:
        in_features: as for ``nn.Linear``, and so are ``out_features``, ``bias``, ``device`` and ``dtype``.
        format: the rank of a product ``U Vᵀ``, or a ``Format``.
        depth: how many square matrices a product has between ``U`` and ``V``.
        execution: how the layer runs: ``"composed"`` forms the weight first, ``"chain"`` applies one thin layer after
            another, ``"auto"`` takes the cheaper way.
        init: how the factors are filled, as for ``fz.factorize``; None leaves them unfilled.
        dense_type: the class it replaces, if that keeps its weight transposed, (in, out), as transformers' ``Conv1D``
            does in GPT-2: then ``y = x W + b``, and the format is that of the transposed weight.

    Raises:
        ValueError: the format is for another shape, or an argument has a wrong value.

    Examples:
        >>> layer = fz.FactorizedLinear.from_dense(nn.Linear(64, 32), 8)
        >>> layer
        FactorizedLinear(64, 32, bias=True, execution=chain, rank=8, params=768 of 2,048)
        >>> layer.U.shape, layer.V.shape, layer.weight.shape
        (torch.Size([32, 8]), torch.Size([64, 8]), torch.Size([32, 64]))
    """

    form_kind = "linear"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: Format | int,
        bias: bool = True,
        *,
        depth: int = 0,
        execution: Execution = "auto",
        init: Init | None = "spectral",
        dense_type: type[nn.Module] = nn.Linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        transposed = dense_type is not nn.Linear
        weight_shape = (in_features, out_features) if transposed else (out_features, in_features)
        super().__init__(format_of(weight_shape, format, depth=depth), execution, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.dense_type = dense_type
        self.transposed = transposed
        if transposed:
            self.nf, self.nx = out_features, in_features  # transformers' names
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        if init is not None:
            self.reset_parameters(init)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Module,
        format: Format | int,
        init: Init | None = "spectral",
        *,
        depth: int = 0,
        execution: Execution = "auto",
        transposed: bool = False,
    ) -> FactorizedLinear:
        """Return a factorized copy of ``dense``; ``init=None`` leaves the factors unfilled."""
        if not transposed:
            check_dense(dense, nn.Linear)
        weight = dense_weight(dense)
        rows, columns = weight.shape
        layer = cls(
            rows if transposed else columns,
            columns if transposed else rows,
            format,
            dense.bias is not None,
            depth=depth,
            execution=execution,
            init=None,
            dense_type=type(dense) if transposed else nn.Linear,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.take_over(dense, init)
        return layer

    def dense_skeleton(self) -> nn.Module:
        """Return a dense layer with this layer's settings on the meta device."""
        if not self.transposed:
            return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        with torch.device("meta"):
            return self.dense_type(self.out_features, self.in_features)

    def forward(
        self,
        input: Tensor,  # (..., in)
    ) -> Tensor:  # (..., out)
        """Apply the layer."""
        if isinstance(input, Proxy):
            return recorded_call(self, input)
        way = self.chosen_execution()
        return self.format.run(way, input, self.factors, self.bias, None, self.adjust, self.transposed)

    def lowered(self) -> list[Lowered]:
        """Return one plain linear for each step of the chain."""
        plain = self.worthwhile(self.format.plain(self.factors))
        if any(step.groups > 1 for step, _ in plain):  # torch has no block-diagonal linear
            return []
        made: list[Lowered] = []
        for place, (step, weight) in enumerate(plain):
            if self.transposed:
                made.insert(0, Lowered(_linear(step.outputs, step.inputs), (place, True), weight.mT))
            else:
                made.append(Lowered(_linear(step.inputs, step.outputs), (place, False), weight))
        return made

    def settings_repr(self) -> list[str]:
        """Return the features, and whether there is a bias."""
        return [f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")
