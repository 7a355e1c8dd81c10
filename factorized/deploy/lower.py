"""``fz.lower``: a factorized model as plain ``torch.nn`` modules that are still low-rank."""

from __future__ import annotations

from torch import Tensor, nn

from factorized.deploy.compose import SharedWeights, convert, dense_layer
from factorized.deploy.lower_tensor import chain_or_dense
from factorized.layers.base import FactorizedLayer
from factorized.layers.composed import ComposedLayer
from factorized.layers.conv import FactorizedConv
from factorized.layers.embedding import FactorizedEmbedding
from factorized.layers.resize import plain_size
from factorized.layers.tensor import TensorizedLayer
from factorized.layers.transposed import FactorizedTransposedLinear
from factorized.maths.kernel import KernelShape, column_kernel, grouped, row_kernel


def lower(model: nn.Module, *, allow_nonfinite: bool = False) -> nn.Module:
    """Return a copy of ``model`` whose low-rank layers are pairs of plain layers in ``nn.Sequential``.

    Two linears, two convolutions, or a narrow embedding and a linear; inner matrices are multiplied into a factor. A
    layer whose pair would be larger than its dense weight (overcomplete ones) is composed instead. A tensor train gives
    two plain layers, a Tucker tensor three (1×1, k×k, 1×1) and a separable convolution its depthwise one before them;
    where its dimensions mix outputs and inputs, the tensor is composed. Shrunken attention keeps the smallest head size
    that its own class can hold: one for all forms, the dense one for ``nn.MultiheadAttention``, which has no other, and
    where rotary embeddings need it. A tied embedding and output layer go on sharing ``U``; ``V`` stands transposed in
    one of them and is copied. The given model is not touched. Code that reads ``layer.weight`` of a lowered layer finds
    a pair there: such a model wants ``fz.compose``. Torch's own encoder, which does so on its fast paths, is kept off
    them; like in training, its output at padded positions is then no longer zero. Weights that are not finite are
    refused unless ``allow_nonfinite``.
    """
    lowered = convert(model, _pair_or_dense, plain_size, allow_nonfinite=allow_nonfinite)
    for module in lowered.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and _has_pair(module):
            module.activation_relu_or_gelu = 0  # torch's own switch for "not on the fast path"
        elif isinstance(module, nn.TransformerEncoder) and _has_pair(module.layers[0]):
            module.use_nested_tensor = False  # the same for the whole encoder, which asks its first layer
    return lowered


def _has_pair(encoder_layer: nn.Module) -> bool:
    linears = [getattr(encoder_layer, name, None) for name in ("linear1", "linear2")]
    return any(isinstance(linear, nn.Sequential) for linear in linears)


def _pair_or_dense(layer: ComposedLayer, shared: SharedWeights) -> nn.Module:
    if isinstance(layer, TensorizedLayer):
        return chain_or_dense(layer, shared)
    assert isinstance(layer, FactorizedLayer)
    if layer.shape.factor_numel(layer.rank) >= layer.shape.numel:
        return dense_layer(layer, shared)
    U, V = _merged_factors(layer)
    if isinstance(layer, FactorizedConv):
        first, second = _convolutions(layer, layer.shape)
        first.weight = shared.parameter(layer, "V kernel", column_kernel(V, layer.shape))
        second.weight = shared.parameter(layer, "U kernel", row_kernel(U, layer.shape))
    elif isinstance(layer, FactorizedTransposedLinear):
        first, second = _linears(layer.in_features, layer.out_features, layer)
        first.weight = shared.parameter(layer, "U transposed", U.mT)
        second.weight = shared.parameter(layer, "V", V)
    elif isinstance(layer, FactorizedEmbedding):
        first, second = _look_up_and_linear(layer)
        first.weight = shared.parameter(layer, "U", U)
        second.weight = shared.parameter(layer, "V", V)
    else:
        first, second = _linears(layer.shape.in_channels, layer.shape.out_channels, layer)
        first.weight = shared.parameter(layer, "V transposed", V.mT)
        second.weight = shared.parameter(layer, "U", U)
    if layer.bias is not None:
        second.bias = layer.bias
    return nn.Sequential(first, second).train(layer.training)


def _merged_factors(layer: FactorizedLayer) -> tuple[Tensor, Tensor]:
    """Return ``U M₁…M_d`` and ``V``."""
    groups = layer.shape.groups
    U = grouped(layer.U, groups)
    for M in layer.inner:
        U = U @ grouped(M, groups)
    return U.flatten(0, 1), layer.V


def _linears(inputs: int, outputs: int, layer: FactorizedLayer) -> tuple[nn.Module, nn.Module]:
    first = nn.Linear(inputs, layer.rank, bias=False, device="meta")
    return first, nn.Linear(layer.rank, outputs, layer.bias is not None, device="meta")


def _look_up_and_linear(layer: FactorizedEmbedding) -> tuple[nn.Module, nn.Module]:
    table = nn.Embedding(
        layer.num_embeddings,
        layer.rank,
        layer.padding_idx,
        scale_grad_by_freq=layer.scale_grad_by_freq,
        sparse=layer.sparse,
        device="meta",
    )
    return table, nn.Linear(layer.rank, layer.embedding_dim, bias=False, device="meta")


def _convolutions(layer: FactorizedConv, shape: KernelShape) -> tuple[nn.Module, nn.Module]:
    middle = shape.groups * layer.rank
    rows = range(shape.row_dims)
    columns = range(shape.row_dims, layer.dims)
    return (
        _convolution(layer, layer.in_channels, middle, columns, bias=False),
        _convolution(layer, middle, layer.out_channels, rows, bias=layer.bias is not None),
    )


def _convolution(layer: FactorizedConv, i: int, o: int, spans: range, bias: bool) -> nn.Module:
    """Return a convolution that has the layer's settings in the dimensions it spans and is pointwise in the others."""

    def keep(values: tuple[int, ...], otherwise: int) -> tuple[int, ...]:
        return tuple(value if d in spans else otherwise for d, value in enumerate(values))

    padding = layer.padding if isinstance(layer.padding, str) else keep(layer.padding, 0)
    plain: nn.Module = layer.dense_type(
        i,
        o,
        keep(layer.kernel_size, 1),
        keep(layer.stride, 1),
        padding,
        keep(layer.dilation, 1),
        layer.groups,
        bias,
        layer.padding_mode,
        device="meta",
    )
    return plain
