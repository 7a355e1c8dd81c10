"""``fz.lower``: a factorized model as plain ``torch.nn`` modules that are still low-rank."""

from __future__ import annotations

from torch import nn

from factorized.attention.resize import plain_size
from factorized.nn.layer import FactorizedLayer
from factorized.surgery.compose import SharedWeights, convert, dense_layer


def lower(model: nn.Module, *, allow_nonfinite: bool = False) -> nn.Module:
    """Return a copy of ``model`` whose low-rank layers are pairs of plain layers in ``nn.Sequential``.

    Two linears, two convolutions, or a narrow embedding and a linear; inner matrices are multiplied into a factor. A
    layer whose pair would be larger than its dense weight (overcomplete ones) is composed instead. A tensor train gives
    two plain layers, a Tucker tensor three (1×1, k×k, 1×1) and a separable convolution its depthwise one before them;
    where its dimensions mix outputs and inputs, the tensor is composed. Shrunk attention keeps the smallest head size
    that its own class can hold: one for all forms, the dense one for ``nn.MultiheadAttention``, which has no other, and
    where rotary embeddings need it. A tied embedding and output layer go on sharing ``U``; ``V`` stands transposed in
    one of them and is copied. The given model is not touched. Code that reads ``layer.weight`` of a lowered layer finds
    a pair there: such a model wants ``fz.compose``. Torch's own encoder, which does so on its fast paths, is kept off
    them; like in training, its output at padded positions is then no longer zero. Weights that are not finite are
    refused unless ``allow_nonfinite``.
    """
    lowered = convert(model, _chain_or_dense, plain_size, allow_nonfinite=allow_nonfinite)
    for module in lowered.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_pair(module):
            module.activation_relu_or_gelu = 0  # torch's own switch for "not on the fast path"
        elif isinstance(module, nn.TransformerEncoder) and _has_pair(module.layers[0]):
            module.use_nested_tensor = False  # the same for the whole encoder, which asks its first layer
    return lowered


def _has_pair(encoder_layer: nn.Module) -> bool:
    linears = [getattr(encoder_layer, name, None) for name in ("linear1", "linear2")]
    return any(isinstance(linear, nn.Sequential) for linear in linears)


def _chain_or_dense(layer: FactorizedLayer, shared: SharedWeights) -> nn.Module:
    chain = layer.lowered()
    if not chain:
        return dense_layer(layer, shared)
    for plain, role, weight in chain:
        if role is not None and weight is not None:
            plain.weight = shared.parameter(layer, role, weight)
    last = chain[-1][0]
    if layer.bias is not None:
        last.bias = layer.bias
    return nn.Sequential(*(plain for plain, _, _ in chain)).train(layer.training)
