"""``fz.Calibrated``: data to choose ranks and factors by, and the moments of every layer on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from factorized._checks import check_whole, warn
from factorized._torch import leaves
from factorized.attention.family import is_transposed
from factorized.formats.calibration import Moment, added, corrected, scaled
from factorized.formats.kernel import KernelShape
from factorized.nn.moments import InputMoments, OutputGradients, collecting
from factorized.nn.running import frozen, move_to, run_once

Kind = TypeVar("Kind", bound=InputMoments)
Loss = Callable[..., Tensor]  # of a model's outputs and the other parts of a batch

NEVER_CALLED = "never called as layers; weights of recurrent networks and of experts never are"
NOT_FINITE = "its inputs on the batches of Calibrated hold NaN or infinite values; nothing was changed"
MANY = 100_000  # examples of batches that may never end


class Calibrated:
    """Data for compressing a trained model: with it as ``init=``, ``fz.factorize`` keeps the outputs of the layers.

    Spectral initialization minimizes ``‖W - U Vᵀ‖``. This one minimizes ``E‖(W - U Vᵀ)x‖²`` over the inputs ``x`` of
    the layer on the batches: the weight is whitened by their second moment, then truncated by its SVD. A bias that no
    other module shares is adjusted to keep the mean of the outputs; ``x`` is then the input minus its mean. The model
    runs without gradients in evaluation mode, and data is moved to its device. A layer that never runs gets spectral
    initialization, and a warning names it. Heads that are cut get it too.

    With ``allocate="spectrum"``, ranks are also chosen by their effect on the outputs on the batches. ``fz.plan``
    takes the same object as ``calibration=``.

    Args:
        batches: an iterable of batches, such as a ``DataLoader``. A batch is what the model's forward takes: a tensor,
            or a dict of keywords. Of a tuple ``(inputs, labels)``, the first is used; it may itself be a tuple of
            arguments or a dict.
        samples: stop after the batch that brings the number of examples to this many; None takes every batch. Needed
            for iterators that never end.
        layers_per_pass: hold the moments of this many layers at a time, and run the batches once for each such part of
            the model; None runs them once. A layer with n inputs (for a convolution: in channels times taps) takes
            8 n² bytes.
        loss: called with the model's outputs and the other parts of the batch: ``F.cross_entropy`` for
            ``(inputs, labels)``, ``lambda outputs: outputs.loss`` for a dict with labels. It is a mean over the batch.
            With it, ``allocate="spectrum"`` weighs the layers by their effect on this loss, found in one backward pass;
            without it, an equal share of the outputs counts the same in every layer.
        sequential: fill one layer after another, in the order in which the model calls them. With the inputs ``x̃`` that
            a layer has behind factors that are filled already, it minimizes ``E‖W x - U Vᵀ x̃‖²``: it makes up for the
            errors of earlier layers. The batches run twice for every layer; layers with the same input, such as the
            projections of an attention, count as one.

    Raises:
        ValueError: an argument has a wrong value; when used, also if the batches hold no examples, or do not run
            through the model, or the loss is not one finite number.

    Examples:
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
        >>> batches = [torch.randn(32, 16) for _ in range(10)]
        >>> model = fz.factorize(model, fz.LowRank(), rank=4, init=fz.Calibrated(batches, samples=256))
        >>> model[2].rank
        4
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        samples: int | None = None,
        layers_per_pass: int | None = None,
        loss: Loss | None = None,
        sequential: bool = False,
    ) -> None:
        if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
            raise ValueError(
                f"batches must be an iterable of batches, such as a DataLoader, got {type(batches).__name__}; put a "
                "single batch into a list: [batch]"
            )
        if samples is not None:
            check_whole("samples", samples)
        if layers_per_pass is not None:
            check_whole("layers_per_pass", layers_per_pass)
        several = "sequential" if sequential else "layers_per_pass" if layers_per_pass is not None else None
        if several is not None and isinstance(batches, Iterator):
            raise ValueError(
                f"{several} runs the batches several times, which an iterator cannot give; pass a list or a DataLoader"
            )
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            remedy = f"; make one: {loss.__name__}()" if isinstance(loss, type) else ""
            raise ValueError(
                f"loss must be a function of outputs and labels, such as F.cross_entropy, got {loss!r}{remedy}"
            )
        self.batches, self.samples, self.layers_per_pass, self.loss = batches, samples, layers_per_pass, loss
        self.sequential = sequential

    def __repr__(self) -> str:
        given = f"samples={self.samples}, layers_per_pass={self.layers_per_pass}"
        weighed = "" if self.loss is None else f", loss={getattr(self.loss, '__name__', type(self.loss).__name__)}"
        ordered = ", sequential=True" if self.sequential else ""
        return f"Calibrated({type(self.batches).__name__}, {given}{weighed}{ordered})"

    def run(self, model: nn.Module, loss: Loss | None = None) -> None:
        """Run ``model`` on the batches; with a loss also backwards, down to outputs but not parameters."""
        for inputs, rest, text in self.examples():
            if loss is None:
                run_once(model, inputs, text)
            else:
                _run_backward(model, loss, inputs, rest, text)

    def examples(self) -> Iterator[tuple[Any, list[Any], str]]:
        """Yield the input of every batch, its other parts, and what an error calls it."""
        seen = 0
        for number, batch in enumerate(self.batches):
            inputs, *rest = batch if isinstance(batch, (tuple, list)) and batch else [batch]
            yield inputs, rest, f"batch {number} of Calibrated(batches)"
            before, seen = seen, seen + _examples(inputs)
            if self.samples is not None and seen >= self.samples:
                return
            if self.samples is None and before < MANY <= seen and not _has_length(self.batches):
                warn(
                    f"Calibrated(batches) has read {seen:,} examples, and its iterator goes on; if it never ends, stop "
                    "this and pass samples=",
                )
        if not seen:
            raise ValueError(
                "Calibrated(batches): batches holds no examples. An iterator that was used before is empty: pass "
                "a list or a DataLoader. Nothing was changed"
            )


def _has_length(batches: Iterable[Any]) -> bool:
    """Return whether the number of batches is known; of a ``DataLoader`` of a stream it is not."""
    try:
        return isinstance(batches, Sized) and len(batches) >= 0
    except (TypeError, NotImplementedError):
        return False


def _run_backward(model: nn.Module, loss: Loss, inputs: Any, rest: Sequence[Any], text: str) -> None:
    with frozen(model.parameters()):
        outputs = run_once(model, inputs, text, gradients=True)
        try:
            with torch.enable_grad():
                value = loss(outputs, *move_to(model, rest))
        except Exception as error:
            raise ValueError(
                f"{text}: loss raised {type(error).__name__}: {str(error).rstrip('.')}. It is called with the model's "
                "outputs and the other parts of the batch"
            ) from error
        if not isinstance(value, Tensor) or value.dim() or not torch.isfinite(value):
            got = f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) and value.dim() else repr(value)
            raise ValueError(f"{text}: loss must return one finite number as a tensor without dimensions, got {got}")
        if value.grad_fn is None:  # it depends on none of the layers that are watched
            return
        try:
            # a loss is a mean over its batch: all examples count alike, those of a small last batch too
            with frozen(leaves(value)):  # such as a teacher's that the loss calls
                value.backward(torch.full_like(value, _examples(inputs)))
        except Exception as error:
            raise ValueError(
                f"{text}: the backward pass of the loss raised {type(error).__name__}: {str(error).rstrip('.')}. Leave "
                "out loss= to choose ranks by the outputs alone"
            ) from error


@dataclass(frozen=True)
class Collected:
    """What the batches show about the layers that share one weight."""

    ran: Mapping[str, InputMoments]  # by name, of those that were called
    gradients: Mapping[str, OutputGradients]  # by name; empty without a backward pass

    @property
    def weighs(self) -> bool:
        """Whether the loss of a backward pass depends on the output of one of the layers at least."""
        return any(one.mean_square > 0 for one in self.gradients.values())

    @property
    def moments(self) -> list[Moment]:
        """The moments of all uses, each scaled by the mean square of its output's gradient if the loss weighs them."""
        found = {name: one.moment for name, one in self.ran.items()}
        if not all(torch.isfinite(moment.sums).all() for moment in found.values()):
            raise ValueError(NOT_FINITE)
        if not all(isfinite(one.mean_square) for one in self.gradients.values()):
            raise ValueError(
                "the gradients of the loss of Calibrated by its outputs hold NaN or infinite values; leave out loss= "
                "to choose ranks by the outputs alone"
            )
        if self.weighs:
            weights = {name: self.gradients[name].mean_square for name in found}
            found = {name: scaled(moment, weights[name]) for name, moment in found.items() if weights[name] > 0}
        return added(list(found.values()))

    def target(
        self,
        weight: Tensor,  # of the shape of the layers' weight
        moments: Sequence[Moment],  # ours
        shape: KernelShape,
    ) -> Tensor:  # like weight
        """Return the weight to approximate: where inputs are paired, the one that makes up for how they differ."""
        crosses = [cross for one in self.ran.values() if (cross := one.cross) is not None]
        if len(moments) > 1 or len(crosses) < len(self.ran):
            return weight
        cross = torch.stack(crosses).sum(0)
        if not torch.isfinite(cross).all():
            raise ValueError(NOT_FINITE)
        return corrected(weight, cross, moments[0], shape)


def collect(
    model: nn.Module,
    calibration: Calibrated,
    sharing: Mapping[str, Mapping[str, nn.Module]],
    loss: Loss | None = None,
) -> Iterator[tuple[str, Collected]]:
    """Run the batches and yield what they show about every weight, by the name of the first layer that has it.

    ``sharing`` has the layers of every weight by their names. With a loss, gradients are collected too. What is yielded
    is emptied at the next step.
    """
    biases = held_once(model)
    for part in parts(list(sharing), calibration.layers_per_pass):
        layers = {name: layer for leader in part for name, layer in sharing[leader].items()}
        moments = {name: moments_of(InputMoments, layer, biases) for name, layer in layers.items()}
        gradients = {name: OutputGradients() for name in layers} if loss is not None else {}
        with collecting(
            {layer: moments[name] for name, layer in layers.items()},
            {layers[name]: one for name, one in gradients.items()},
        ):
            calibration.run(model, loss)
        for leader in part:
            ran = {name: moments.pop(name) for name in sharing[leader] if moments[name].samples}
            yield leader, Collected(ran, {name: gradients[name] for name in ran if gradients})
            ran.clear()  # the caller's loop holds it while the batches run again


def moments_of(kind: type[Kind], layer: nn.Module, held_once: Container[Any]) -> Kind:
    """Return empty moments of a layer: around the mean if it has a bias, and no other module holds that."""
    centered = layer._parameters.get("bias") in held_once
    return kind(layer, transposed=is_transposed(layer), centered=centered)


def held_once(model: nn.Module) -> set[nn.Parameter | None]:
    """Return the parameters that only one module holds."""
    held = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    return {parameter for parameter, times in held.items() if times == 1 and parameter is not None}


def parts(names: list[str], size: int | None) -> Iterator[list[str]]:
    """Yield the names in lists of this size, or all in one."""
    rest = iter(names)
    while part := list(islice(rest, size)):
        yield part


def _examples(inputs: Any) -> int:
    """Return the size of the batch: the first dimension of its first tensor; 1 where there is none."""
    values = (
        inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else [inputs]
    )
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
    return tensors[0].shape[0] if tensors else 1
