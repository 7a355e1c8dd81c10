"""Tensorized layers as a few plain ``torch.nn`` layers, one after the other."""

from __future__ import annotations

from torch import Tensor, nn

from factorized.deploy.compose import SharedWeights, dense_layer
from factorized.layers.tensor import TensorizedLayer
from factorized.layers.tensor_conv import TensorizedConv2d
from factorized.maths.contraction import can_contract, chain, spanning_place


def chain_or_dense(layer: TensorizedLayer, shared: SharedWeights) -> nn.Module:
    """Return plain layers that compute what ``layer`` does: the chain of its tensor, where that is smaller than dense.

    A convolution keeps stride, padding and dilation in the one layer that spans space.
    """
    kernels = _kernels(layer)
    taps = 0 if layer.depthwise is None else layer.depthwise.numel()
    if taps + sum(kernel.numel() for kernel in kernels) >= layer.shape.numel:
        return dense_layer(layer, shared)
    if isinstance(layer, TensorizedConv2d):
        plain = _convolutions(layer, kernels, shared)
    else:
        plain = [
            nn.Linear(kernel.shape[1], kernel.shape[0], _has_bias(layer, place, kernels), device="meta")
            for place, kernel in enumerate(kernels)
        ]
        _fill(plain, kernels, layer, shared)
    if layer.bias is not None:
        plain[-1].bias = layer.bias
    return nn.Sequential(*plain).train(layer.training)


def _kernels(layer: TensorizedLayer) -> list[Tensor]:
    """Return the weights of the chain; of a tensor without one, the composed weight alone."""
    if can_contract(layer.folding):
        kernels = chain(layer.folding, layer.format, list(layer.cores))
        if sum(kernel.numel() for kernel in kernels) < layer.folding.shape.numel:
            return kernels
    return [layer.product]


def _convolutions(layer: TensorizedConv2d, kernels: list[Tensor], shared: SharedWeights) -> list[nn.Module]:
    spans = spanning_place(layer.folding, len(kernels)) if layer.depthwise is None else None
    plain: list[nn.Module] = []
    if layer.depthwise is not None:
        plain.append(_convolution(layer, layer.in_channels, layer.in_channels, layer.in_channels, False))
        plain[0].weight = shared.parameter(layer, "depthwise", layer.depthwise)
    pointwise: list[nn.Module] = []
    for place, kernel in enumerate(kernels):
        bias, (o, i) = _has_bias(layer, place, kernels), kernel.shape[:2]
        if place == spans:
            pointwise.append(_convolution(layer, i * layer.groups, o, layer.groups, bias))
        else:
            pointwise.append(nn.Conv2d(i, o, 1, bias=bias, device="meta"))
    _fill(pointwise, kernels, layer, shared)
    return [*plain, *pointwise]


def _convolution(layer: TensorizedConv2d, i: int, o: int, groups: int, bias: bool) -> nn.Module:
    plain: nn.Module = layer.dense_type(
        i,
        o,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        groups,
        bias,
        layer.padding_mode,
        device="meta",
    )
    return plain


def _fill(plain: list[nn.Module], kernels: list[Tensor], layer: TensorizedLayer, shared: SharedWeights) -> None:
    for place, (module, kernel) in enumerate(zip(plain, kernels, strict=True)):
        module.weight = shared.parameter(layer, f"kernel {place}", kernel)


def _has_bias(layer: TensorizedLayer, place: int, kernels: list[Tensor]) -> bool:
    return layer.bias is not None and place == len(kernels) - 1
