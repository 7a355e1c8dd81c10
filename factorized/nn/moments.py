"""Second moments of the inputs of dense layers, and of the gradients of their outputs, collected while a model runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from factorized._torch import in_backward
from factorized.formats.calibration import Moment
from factorized.formats.convolution import explicit_padding, pad
from factorized.nn.dense import dense_weight
from factorized.nn.running import removing

# Patches of this many entries are multiplied at a time, or those of one example if that has more.
PATCH_ENTRIES = 2**24
# Rows of a moment that are computed at a time, from their diagonal entries on: what is below mirrors what is above.
ROWS = 256
# Inputs that vary by less than this many roundings of their type, next to their mean, are constant.
ROUNDINGS = 4


class InputMoments:
    """Adds up the second moment of what one layer is called with.

    Args:
        layer: the dense layer.
        transposed: whether it keeps its weight as (in, out), like transformers' ``Conv1D``.
        centered: whether the moment is that around the mean, for a layer whose bias can account for the mean.
    """

    def __init__(self, layer: nn.Module, *, transposed: bool = False, centered: bool = False) -> None:
        self.weight_shape = dense_weight(layer).shape
        self.looks_up = isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
        self.transposed = transposed or self.looks_up or isinstance(layer, _ConvTransposeNd)
        self.centered = centered
        self.samples = 0  # inputs seen: tokens, positions of patches, rows looked up
        self.rounding = 0.0  # of their type, relative
        zero = torch.zeros((), device="cpu")  # which goes with tensors on any device
        self.origin = zero  # (groups, inputs); taken from inputs if centered: constant ones leave nothing
        self.sums = zero  # of the moment's shape from the first call on, blocks below the diagonal left out
        self.total = zero  # (groups, inputs)

    @property
    def mean(self) -> Tensor:  # (groups, inputs)
        """The mean of the inputs, once there are samples."""
        return self.origin + self.total / self.samples

    @property
    def dense_mean(self) -> Tensor:  # (groups, inputs)
        """The mean of the inputs whose outputs are to be kept."""
        return self.mean

    @property
    def cross(self) -> Tensor | None:
        """None: these inputs have no pairs."""
        return None

    @property
    def moment(self) -> Moment:
        """What was collected, once there are samples; zero around the mean of inputs that vary by rounding alone."""
        if self.looks_up:
            return Moment(self.sums, self.transposed)
        around = torch.einsum("gi,gj->gij", self.total, self.total) / self.samples if self.centered else 0
        upper = (self.sums - around).triu()
        if self.centered:
            noise = self.samples * (ROUNDINGS * self.rounding * self.mean).square().sum()
            constant = upper.diagonal(dim1=-2, dim2=-1).sum() <= noise  # false for NaN, which has to be seen
            upper = torch.where(constant, 0, upper)
        return Moment(upper + upper.triu(1).mT, self.transposed)

    @property
    def directions(self) -> int:
        """The least number of samples that can show every direction of the inputs."""
        return min(self.weight_shape) if self.looks_up else self.sums.shape[-1]

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Add the inputs of one call: a forward pre-hook with keywords."""
        if in_backward():  # they were added when the checkpoint ran the first time
            return
        x = input_of(arguments, keywords)
        if not x.numel():
            return
        if self.looks_up:
            self._count(x, layer.padding_idx if isinstance(layer, nn.EmbeddingBag) else None)
            return
        for rows in _rows(x, layer, _argument(1, "output_size", arguments, keywords)):
            self._add(rows)

    def _add(
        self,
        x: Tensor,  # (groups, samples, inputs)
    ) -> None:
        self.rounding = torch.finfo(x.dtype).eps
        if self.centered:
            if not self.samples:
                self.origin = x[:, 0].to(torch.float64, copy=True)  # code after the layer may write to its input
            x = x - self.origin.unsqueeze(1)
        x = x.double()  # rounding would outweigh what is small beside a large mean, and weights in unseen directions
        groups, samples, inputs = x.shape
        if not self.samples:
            self.sums = x.new_zeros(groups, inputs, inputs)
        for start in range(0, inputs, ROWS):
            rows = slice(start, start + ROWS)
            self.sums[:, rows, start:].baddbmm_(x[..., rows].mT, x[..., start:])
        self._count_in(x.sum(1), samples)

    def _count(self, indices: Tensor, padding: int | None) -> None:
        """Count how often every row is looked up: its inputs are one-hot, so that their moment is diagonal."""
        counts = torch.bincount(indices.reshape(-1), minlength=self.weight_shape[0]).double().unsqueeze(0)
        if padding is not None:
            counts[:, padding] = 0  # bags leave it out
        self.sums = self.sums + counts
        self._count_in(counts, indices.numel())

    def _count_in(self, total: Tensor, samples: int) -> None:
        self.total = self.total + total if self.samples else total
        self.samples += samples


class InputPairs(InputMoments):
    """Adds up the moments of the inputs ``x̃`` of one layer, and ``Σ x x̃ᵀ`` with those it had in an earlier run.

    ``expect`` is a hook for the earlier run, and the object itself one for the later. ``end`` ends a batch. Where the
    layer is called otherwise in the later run, as an expert may be that a router chooses, nothing is paired.
    """

    def __init__(self, layer: nn.Module, *, transposed: bool = False, centered: bool = False) -> None:
        super().__init__(layer, transposed=transposed, centered=centered)
        self.paired = not self.looks_up  # what is looked up has no error
        self.expected: deque[Tensor] = deque()
        self.earlier: Iterator[Tensor] = iter(())  # the rows of one call
        zero = torch.zeros((), device="cpu")
        self.earlier_origin, self.earlier_total, self.products = zero, zero, zero  # each as that of the later inputs

    @property
    def dense_mean(self) -> Tensor:  # (groups, inputs)
        """The mean of the earlier inputs, where they are paired."""
        return self.earlier_origin + self.earlier_total / self.samples if self.paired else self.mean

    @property
    def cross(self) -> Tensor | None:  # (groups, inputs, inputs)
        """``Σ x x̃ᵀ``, around the means if centered; None if nothing is paired."""
        if not self.paired:
            return None
        around = torch.einsum("gi,gj->gij", self.earlier_total, self.total) / self.samples if self.centered else 0
        return self.products - around

    def expect(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep the inputs of one call in the earlier run, which code after it may overwrite."""
        if self.paired:
            self.expected.append(input_of(arguments, keywords).clone())

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Add the inputs of one call in the later run."""
        earlier = self.expected.popleft() if self.expected else None
        if earlier is None or earlier.shape != input_of(arguments, keywords).shape:
            self.paired = False
        else:
            self.earlier = _rows(earlier, layer, _argument(1, "output_size", arguments, keywords))
        super().__call__(layer, arguments, keywords)

    def end(self) -> None:
        """End a batch: every call of the earlier run has had its pair."""
        self.paired = self.paired and not self.expected
        self.expected.clear()

    def _add(self, x: Tensor) -> None:
        first = not self.samples
        super()._add(x)
        if not self.paired:
            return
        earlier, x = next(self.earlier).double(), x.double()
        if first:
            self.products = torch.zeros_like(self.sums)
            self.earlier_origin = earlier[:, 0].clone() if self.centered else self.earlier_origin
        if self.centered:
            earlier, x = earlier - self.earlier_origin.unsqueeze(1), x - self.origin.unsqueeze(1)
        self.products.baddbmm_(earlier.mT, x)
        self.earlier_total = self.earlier_total + earlier.sum(1)


class OutputGradients:
    """Adds up the squares of the gradients that the outputs of one layer get in backward passes."""

    def __init__(self) -> None:
        self.squares, self.entries = 0.0, 0

    @property
    def mean_square(self) -> float:
        """The mean over all entries of all outputs; 0 before any."""
        return self.squares / max(1, self.entries)

    def __call__(self, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        """Watch the output of one call: a forward hook."""
        if not torch.is_grad_enabled():  # a part that runs without gradients, whose effect nobody knows
            return output
        if not output.requires_grad:  # the first layer of all: a copy, as code after it may write in place
            output = output.detach().requires_grad_().clone()
        output.register_hook(self._add)
        return output

    def _add(self, gradient: Tensor) -> None:
        self.squares += gradient.double().square().sum().item()
        self.entries += gradient.numel()


@contextmanager
def collecting(
    found: Mapping[nn.Module, InputMoments], gradients: Mapping[nn.Module, OutputGradients] | None = None
) -> Iterator[None]:
    """Collect the moments and gradients of these layers whenever they are called inside."""
    hooks = [layer.register_forward_pre_hook(moments, with_kwargs=True) for layer, moments in found.items()]
    hooks += [layer.register_forward_hook(watch) for layer, watch in (gradients or {}).items()]
    with removing(hooks):
        yield


def input_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor:
    """Return the input of a call of a layer."""
    x = _argument(0, "input", arguments, keywords)
    return (next(iter(keywords.values())) if x is None else x).detach()  # transformers' Conv1D calls it x


def _rows(x: Tensor, layer: nn.Module, output_size: list[int] | None) -> Iterator[Tensor]:  # (groups, samples, inputs)
    """Yield what the weight of a layer is applied to."""
    if not isinstance(layer, _ConvNd):
        yield x.reshape(1, -1, x.shape[-1])
        return
    spatial = x if x.dim() == len(layer.kernel_size) + 2 else x.unsqueeze(0)
    chunk = max(1, PATCH_ENTRIES // (spatial[:1].numel() * prod(layer.kernel_size)))
    for part in spatial.split(chunk):
        yield patches(part, layer, output_size)


def _argument(place: int, name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return an argument of a call, given by its place or its name, or None."""
    return arguments[place] if len(arguments) > place else keywords.get(name)


def patches(
    x: Tensor,  # (batch, in, *spatial)
    layer: _ConvNd,
    output_size: list[int] | None = None,
) -> Tensor:  # (groups, batch·positions, in/groups·taps)
    """Return the inputs of every output position of a convolution, in the order of its weight's entries.

    A transposed convolution is a plain one with the kernel reversed, over its input with ``stride - 1`` zeros between
    neighbours; ``output_size`` is what it is called with.
    """
    size, dilation, dims = layer.kernel_size, layer.dilation, range(len(layer.kernel_size))
    if layer.transposed:
        added: Any = _ConvTransposeNd._output_padding  # of the layer, or what the output size asks for
        added = added(layer, x, output_size, layer.stride, layer.padding, size, len(size), dilation)
        x = _spread(x, layer.stride)
        cut = [before for before, _ in explicit_padding(layer.padding, size, dilation)]
        kept = [dilation[d] * (size[d] - 1) - cut[d] for d in dims]
        padding = tuple((kept[d], kept[d] + added[d]) for d in dims)
        stride: tuple[int, ...] = (1,) * len(size)
    else:
        padding, stride = explicit_padding(layer.padding, size, dilation), layer.stride
    x = pad(x, padding, layer.padding_mode)
    for d in dims:
        x = x.unfold(2 + d, dilation[d] * (size[d] - 1) + 1, stride[d])[..., :: dilation[d]]
    if layer.transposed:
        x = x.flip([2 + len(size) + d for d in dims])
    x = x.unflatten(1, (layer.groups, -1))  # (batch, groups, in/groups, *positions, *size)
    n = len(size)
    ordered = x.permute(1, 0, *range(3, 3 + n), 2, *range(3 + n, 3 + 2 * n))
    return ordered.reshape(layer.groups, prod(ordered.shape[1 : 2 + n]), -1)


def _spread(x: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Put ``stride - 1`` zeros between neighbours in every spatial dimension."""
    extents = [(extent - 1) * s + 1 for extent, s in zip(x.shape[2:], stride, strict=True)]
    spread = x.new_zeros(*x.shape[:2], *extents)
    spread[(slice(None), slice(None), *[slice(None, None, s) for s in stride])] = x
    return spread
