"""The weight of a factorized layer as other code reads it: formed at its first use, and read-only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Proxy

from factorized._torch import is_traced, saving_hooks, shares_memory, without_torch_function
from factorized.formats.format import Format
from factorized.nn.recorded import recorded_weight

PLAIN = (nn.Parameter, Tensor)  # other factors, such as DTensors, fake and batched tensors, are composed at once
WRITTEN = (
    "the weight is computed from the layer's factors, so that a write to it would be lost. Set layer.weight = W to "
    "decompose W into the factors, change the factors themselves (layer.factors), or write to a copy, weight.clone(). "
    "If the model's own code writes to it, keep the layer dense: exclude="
)
FROZEN = (
    "the weight is computed from the layer's factors, so that it has no requires_grad to set. Freeze the factors by "
    "layer.requires_grad_(False); for a parameter of your own take a copy, nn.Parameter(weight.detach().clone())"
)


def read_weight(owner: nn.Module, format: Format, factors: Sequence[Tensor]) -> Tensor:
    """Return the weight that the factors of ``owner`` stand for, in their type: differentiable and read-only.

    In eager mode this is a ``ComposedWeight``. While a program is traced it is a plain tensor: a trace drops what is
    not used, and knows torch's own classes only.
    """
    if is_traced():
        return _compose(format, factors)
    factor = attrgetter(next(iter(format.cores)))(owner)  # while torch.fx traces, it returns proxies of parameters
    if isinstance(factor, Proxy):
        return recorded_weight(owner, factor)
    if not all(type(factor) in PLAIN for factor in factors):
        return _compose(format, factors)
    trains = any(factor.requires_grad for factor in factors)
    like = factors[0]
    form = partial(_compose, format, factors)
    return _Source(form, factors, format.shape.weight_shape, like.dtype, like.device, trains, owner).weight()


def owner_of(weight: Tensor) -> nn.Module | None:
    """Return the layer whose ``weight`` this very tensor is, or None."""
    return weight.source.owner if isinstance(weight, ComposedWeight) else None


def _compose(format: Format, factors: Sequence[Tensor]) -> Tensor:
    # In the factors' type, where autocast composes in another, and contiguous, as the weight of a plain layer is.
    weight, dtype = format.compose(factors), factors[0].dtype
    return (weight if weight.dtype == dtype else weight.to(dtype)).contiguous()


class ComposedWeight(Tensor):
    """A weight that is formed from factors when one of its values is first needed.

    Its shape, type and device are known without that. Every other function is called with the plain tensor, through
    which autograd reaches the factors. A write to it, or to a view of it, raises; so does one to its numpy array.
    """

    source: _Source
    _is_hf_initialized = True  # transformers draws the weights that have no such mark, after it loaded the others

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with the plain tensor, where it needs one."""
        if func in _NEEDS_NO_VALUE:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if func in _ANSWERS:
            return _ANSWERS[func](*args, **(kwargs or {}))
        result, values = _call_with_plain(func, args, kwargs or {})
        if func in _TO_NUMPY and not result.flags.owndata:
            result.flags.writeable = False  # torch does not see what numpy writes
        return _read_only(result, values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves it untyped
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the same for callers that bypass ``__torch_function__``: C++ code, and what autograd saves."""
        if func is torch.ops.aten.detach.default:
            return args[0].source.detached()
        result, _ = _call_with_plain(func, args, kwargs or {})
        return result


class _Source:
    """What a ``ComposedWeight`` stands for: a plain tensor, formed once, in the gradient mode in which it was read."""

    def __init__(
        self,
        form: Callable[[], Tensor],
        inputs: Sequence[Tensor],  # that receive the gradient
        extents: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        trains: bool,
        owner: nn.Module | None = None,
    ) -> None:
        self.form = form
        self.inputs = inputs
        self.extents = extents
        self.dtype = dtype
        self.device = device
        self.trains = trains
        self.owner = owner
        self.records = trains and torch.is_grad_enabled()
        self.hooks = saving_hooks()
        self._formed: Tensor | None = None

    def weight(self) -> Tensor:
        """Return a ``ComposedWeight`` of this source, in the graph of the inputs where gradients are recorded."""
        made = _InGraph.apply(self, *self.inputs) if self.records else self.outside_graph()
        made.source = self
        return made

    def outside_graph(self) -> ComposedWeight:
        """Return a ``ComposedWeight`` that is not in autograd's graph."""
        made: ComposedWeight = Tensor._make_wrapper_subclass(
            ComposedWeight, self.extents, dtype=self.dtype, device=self.device
        )
        return made

    def value(self) -> Tensor:
        """Return the plain tensor."""
        if self._formed is not None:
            return self._formed
        if torch.compiler.is_compiling():
            return self.form()
        if self._is_as_when_read():
            formed = self.form()
        else:
            # Leave inference mode, whose tensors do not count writes. A checkpoint that began after the weight was read
            # must not see what is saved here: it would not find it when it runs again.
            hooks = self.hooks or (lambda tensor: tensor, lambda tensor: tensor)
            with torch.inference_mode(False), torch.set_grad_enabled(self.records), saved_tensors_hooks(*hooks):
                formed = self.form()
        if formed.requires_grad == self.records:  # else this is below autograd, and later callers need the graph
            self._formed = formed
        return formed

    def _is_as_when_read(self) -> bool:
        same_mode = torch.is_grad_enabled() == self.records and not torch.is_inference_mode_enabled()
        return same_mode and saving_hooks() == self.hooks

    def gradient(self) -> Tensor | None:
        """Return the gradient that the plain tensor retains, or None."""
        return self._formed.grad if self._formed is not None and self._formed.retains_grad else None

    def detached(self) -> Tensor:
        """Return the weight without gradients, read-only too."""
        return _Source(lambda: self.value().detach(), (), self.extents, self.dtype, self.device, False).weight()


class _InGraph(torch.autograd.Function):
    """A ``ComposedWeight`` with its place in the graph, for custom functions, which receive this very tensor."""

    apply: ClassVar[Callable[..., ComposedWeight]]  # torch leaves it untyped

    @staticmethod
    def forward(ctx: Any, source: _Source, *inputs: Tensor) -> Tensor:
        ctx.source = source
        return source.outside_graph()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, inputs, again = ctx.source.value(), ctx.source.inputs, torch.is_grad_enabled()
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, gradient, retain_graph=True, create_graph=again))
        return (None, *[next(found) if tensor.requires_grad else None for tensor in inputs])


def _call_with_plain(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, list[Tensor]]:
    """Call ``func`` with plain tensors, and return its result and them; raise if it wrote to one."""
    used: list[Tensor] = []
    args, kwargs = _plain(args, used), _plain(kwargs, used)
    if torch.compiler.is_compiling():  # a trace can neither count writes nor compare memory
        return func(*args, **kwargs), []
    before = [value._version for value in used]
    result = func(*args, **kwargs)
    if before != [value._version for value in used]:
        raise RuntimeError(WRITTEN)
    return result, used


def _plain(argument: Any, used: list[Tensor]) -> Any:
    """Return an argument with the plain tensor in place of every ``ComposedWeight``; note those in ``used``."""
    kind = type(argument)
    if kind is ComposedWeight:
        used.append(argument.source.value())
        return used[-1]
    if kind is list:
        return [_plain(part, used) for part in argument]
    if kind is tuple:
        return tuple([_plain(part, used) for part in argument])
    if kind is dict:
        return {key: _plain(part, used) for key, part in argument.items()}
    return argument


def _read_only(result: Any, values: list[Tensor]) -> Any:
    """Return a result whose tensors refuse to be written to where they share memory with one of ``values``."""
    if isinstance(result, Tensor):
        if not any(shares_memory(result, value) for value in values):
            return result
        inputs = (result,) if result.requires_grad else ()
        return _Source(lambda: result, inputs, result.shape, result.dtype, result.device, result.requires_grad).weight()
    if type(result) in (list, tuple):
        return type(result)([_read_only(part, values) for part in result])
    return result


def _detach(weight: ComposedWeight) -> Tensor:
    return weight.source.detached()


def _deepcopy(weight: ComposedWeight, memo: dict[int, Any]) -> Tensor:
    copy = weight.source.value().detach().clone().requires_grad_(weight.source.trains)
    memo[id(weight)] = copy
    return copy


def _to_dlpack(weight: ComposedWeight, *, copy: bool | None = None, **keywords: Any) -> Any:
    if not copy:
        keywords["max_version"] = None  # numpy takes the memory of an unversioned capsule as read-only
    return weight.source.value().__dlpack__(copy=copy, **keywords)


def _gradient(weight: ComposedWeight) -> Tensor | None:
    return weight.source.gradient()


def _set_gradient(weight: ComposedWeight, gradient: Tensor | None) -> None:
    if gradient is not None:
        raise RuntimeError(WRITTEN)


def _refuse_data(weight: ComposedWeight, data: Tensor) -> None:
    raise RuntimeError(WRITTEN)


def _requires_grad(weight: ComposedWeight) -> bool:
    return weight.source.trains


def _refuse_requires_grad(weight: ComposedWeight, requires_grad: bool = True) -> None:
    raise RuntimeError(FROZEN)


_TENSOR: Any = Tensor  # its attributes are descriptors, which mypy takes for what they return
_ATTRIBUTES = "shape dtype device layout ndim itemsize nbytes name is_leaf grad_fn is_cpu is_cuda is_meta is_mps is_xpu"
_METHODS = "size dim ndimension numel nelement element_size get_device is_floating_point is_complex is_signed __len__"
_NEEDS_NO_VALUE = {
    *(getattr(Tensor, name).__get__ for name in (*_ATTRIBUTES.split(), "is_quantized", "is_sparse", "is_nested")),
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(torch.numel, torch.is_floating_point, torch.is_complex),
}
_TO_NUMPY = {_TENSOR.numpy, _TENSOR.__array__}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.detach: _detach,
    _TENSOR.detach: _detach,
    _TENSOR.data.__get__: _detach,
    _TENSOR.data.__set__: _refuse_data,
    _TENSOR.grad.__get__: _gradient,
    _TENSOR.grad.__set__: _set_gradient,
    _TENSOR.requires_grad.__get__: _requires_grad,
    _TENSOR.requires_grad.__set__: _refuse_requires_grad,
    _TENSOR.requires_grad_: _refuse_requires_grad,
    _TENSOR.__deepcopy__: _deepcopy,
    _TENSOR.__dlpack__: _to_dlpack,
}
