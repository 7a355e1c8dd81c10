"""``fz.ColwiseParallel`` and ``fz.RowwiseParallel``: tensor parallelism by torch's ``parallelize_module``.

A product ``y = U (Vᵀx)`` has a thin tensor in its middle, r numbers per token. One outer factor is split by rows over
the ranks, the others are replicated, and only the thin tensor is communicated. DTensor alone would send wide tensors,
or the gradient of the replicated factor; so here every rank computes with its local parts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod
from typing import NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import style
from torch.distributed.tensor.placement_types import Placement

from factorized._torch import local_range
from factorized.formats.format import Way
from factorized.nn.embedding import FactorizedEmbedding, scale_gradient
from factorized.nn.layer import FactorizedLayer
from factorized.nn.linear import FactorizedLinear

# Attribute of a parameter that holds its distributed version, so that layers that share the one share the other.
_DISTRIBUTED = "_distributed_as"


class ColwiseParallel(style.ColwiseParallel):
    """Split a layer by its outputs in ``parallelize_module``; for a dense layer, torch's ``ColwiseParallel``.

    The factor on the side of the output is split by rows, with the bias: ``U`` of a linear, ``V`` of an embedding or of
    a transposed linear. Only the gradient of the thin tensor is communicated, r numbers per token, in the backward
    pass. Where the tokens of the input are split (``input_layouts=Shard(1)``, as after ``SequenceParallel``), the thin
    tensor is gathered.

    Takes torch's arguments: ``input_layouts``, ``output_layouts``, ``use_local_output``.

    Raises:
        ValueError: when applied, if the layer or the mesh cannot be split; the message has the remedy.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = torch.distributed.init_device_mesh("cpu", (2,))  # in two processes, as torchrun starts them
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8), fz.FactorizedLinear(64, 64, 8))
        >>> model = parallelize_module(model, mesh, {"0": fz.ColwiseParallel(), "1": fz.RowwiseParallel()})
        >>> model[0].U.to_local().shape, model[0].V.to_local().shape
        (torch.Size([32, 8]), torch.Size([64, 8]))
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FactorizedLayer):
            return super()._apply(module, device_mesh)
        return _split(module, device_mesh, self, by_outputs=True)

    def run(self, layer: ParallelLayer, x: DTensor) -> DTensor:
        """Return the output of a layer, by ``Shard(-1)``."""
        if layer.features and x.placements[0].is_shard(x.dim() - 1):
            x = x.redistribute(placements=[Replicate()])
        first, *middle, last = layer.way
        placed = x.placements[0]
        split_tokens = not placed.is_replicate()  # then a rank has a partial sum of a replicated factor's gradient
        h = layer.enter(_own(x), _own(first, split_tokens), 0)
        for M in middle:
            h = h @ layer.turned(_own(M, split_tokens))
        h = _travel(h, x, (*layer.tokens(x), h.shape[-1]), placed, Replicate(), gradient=Partial())
        y = layer.leave(F.linear(h, _own(last), layer.own_bias()), x, Replicate())
        return _placed(y, x, (*layer.tokens(x), last.shape[0]), Shard(y.dim() - 1))


class RowwiseParallel(style.RowwiseParallel):
    """Split a layer by its inputs in ``parallelize_module``; for a dense layer, torch's ``RowwiseParallel``.

    The factor on the side of the input is split by rows: ``V`` of a linear, ``U`` of a transposed linear or of an
    embedding (by entries). Only the thin tensor, r numbers per token, is communicated, in the forward pass. Where
    the tokens of the output are to be split (``output_layouts=Shard(1)``, as for ``SequenceParallel``), a rank gets
    only the sums of its own tokens.

    Takes torch's arguments: ``input_layouts``, ``output_layouts``, ``use_local_output``.

    Raises:
        ValueError: when applied, if the layer or the mesh cannot be split; the message has the remedy.

    Examples:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> mesh = torch.distributed.init_device_mesh("cpu", (2,))  # in two processes, as torchrun starts them
        >>> layer = parallelize_module(fz.FactorizedLinear(64, 64, 8), mesh, fz.RowwiseParallel())
        >>> layer.U.to_local().shape, layer.V.to_local().shape
        (torch.Size([64, 8]), torch.Size([32, 8]))
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, FactorizedLayer):
            return super()._apply(module, device_mesh)
        if self.output_layouts[0].is_partial():
            raise ValueError(
                f"output_layouts must be Replicate() or Shard(), got {self.output_layouts[0]} for {module}: its ranks "
                "sum the rank-r tensor, so that no partial sums are left in the output"
            )
        return _split(module, device_mesh, self, by_outputs=False)

    def run(self, layer: ParallelLayer, x: DTensor) -> DTensor:
        """Return the output of a layer, with its tokens split as ``output_layouts`` says, or replicated."""
        if layer.features:
            x = x.redistribute(placements=[Shard(x.dim() - 1)])
        first, *middle, last = layer.way
        tokens = layer.tokens(x)
        wanted = self.output_layouts[0]
        splits_tokens = any(wanted.is_shard(dim) for dim in range(len(tokens)))
        placed = wanted if splits_tokens else Replicate()
        h = layer.enter(_own(x), _own(first), local_range(first, 0)[0])
        h = _travel(h, x, (*tokens, h.shape[-1]), Partial(), placed, gradient=placed)
        for M in middle:
            h = h @ layer.turned(_own(M, splits_tokens))
        y = layer.leave(F.linear(h, _own(last, splits_tokens), layer.own_bias(splits_tokens)), x, placed)
        return _placed(y, x, (*tokens, last.shape[0]), placed)


class ParallelLayer(FactorizedLayer):
    """A product split over ranks: one outer factor is split by rows, the others are replicated. Abstract."""

    style: ColwiseParallel | RowwiseParallel
    tunable = False
    features: int  # dimensions of the input behind those of its tokens

    @property
    @abstractmethod
    def from_right(self) -> bool:
        """Whether the input is multiplied by ``V`` first."""

    @abstractmethod
    def enter(
        self,
        x: Tensor,  # (..., this rank's features), or indices
        rows: Tensor,  # (this rank's, rank) of the first factor
        start: int,  # the first of these rows
    ) -> Tensor:  # (..., rank)
        """Return the thin tensor, or this rank's partial sum of it."""

    def leave(self, y: Tensor, x: DTensor, placed: Placement) -> Tensor:
        """Return the layer's output from ``y``, whose tokens are ``placed`` like this."""
        return y

    @property
    def way(self) -> list[DTensor]:
        """The factors in the order in which they are applied."""
        factors = cast(tuple[DTensor, ...], self.factors)
        return list(factors[::-1] if self.from_right else factors)

    def turned(
        self,
        M: Tensor,  # (rank, rank)
    ) -> Tensor:  # (rank, rank)
        """Return an inner matrix, transposed where the thin tensor needs it so."""
        return M.mT if self.from_right else M

    def own_bias(self, sums_gradient: bool = False) -> Tensor | None:
        """Return this rank's part of the bias, if there is one."""
        return _own(self.bias, sums_gradient) if isinstance(self.bias, DTensor) else None

    def tokens(self, x: Tensor) -> torch.Size:
        """Return the shape of an input without its features."""
        return x.shape[: x.dim() - self.features]

    def chosen_execution(self, input: Tensor | None = None) -> Way:
        """Return ``"chain"``: a composed weight would send wide tensors."""
        return "chain"

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to an input in the style's ``input_layouts``."""
        if self.drops:
            _refuse_drops(self)
        if not isinstance(input, DTensor):
            mesh = self.way[0].device_mesh
            input = DTensor.from_local(input, mesh, self.style.input_layouts, run_check=False)
        if not self.features:  # indices are smaller than what is looked up
            input = input.redistribute(placements=[Replicate()])
        output = self.style.run(self, input).redistribute(placements=self.style.output_layouts)
        return output.to_local() if self.style.use_local_output else output


class ParallelLinear(ParallelLayer, FactorizedLinear):
    """A linear split over ranks."""

    features = 1

    @property
    def from_right(self) -> bool:
        """Whether the weight is not transposed."""
        return not self.transposed

    def enter(self, x: Tensor, rows: Tensor, start: int) -> Tensor:
        """Multiply by the first factor."""
        return x @ rows


class ParallelEmbedding(ParallelLayer, FactorizedEmbedding):
    """An embedding split over ranks."""

    features = 0
    from_right = False

    def enter(self, x: Tensor, rows: Tensor, start: int) -> Tensor:
        """Look up thin rows; those of other ranks are zeros."""
        if len(rows) == self.num_embeddings:
            return F.embedding(x, rows)
        elsewhere = (x < start) | (x >= start + len(rows))
        return F.embedding((x - start).masked_fill(elsewhere, 0), rows).masked_fill(elsewhere.unsqueeze(-1), 0)

    def leave(self, y: Tensor, x: DTensor, placed: Placement) -> Tensor:
        """Return rows in the table's type, with the gradient scaled as the dense layer would."""
        y = y.to(self.factors[0].dtype)
        scale = self._gradient_scale(_own(x), y.dtype) if torch.is_grad_enabled() else None
        if scale is None:
            return y
        scale = _travel(scale, x, scale.shape, Replicate(), placed, gradient=placed)
        return scale_gradient(y, scale)


_PARALLEL: dict[type[FactorizedLayer], type[ParallelLayer]] = {
    FactorizedLinear: ParallelLinear,
    FactorizedEmbedding: ParallelEmbedding,
}


def _split(
    layer: FactorizedLayer, mesh: DeviceMesh, style: ColwiseParallel | RowwiseParallel, *, by_outputs: bool
) -> ParallelLayer:
    """Split a layer over the ranks of ``mesh``, in place."""
    parallel = _parallel_class(layer, mesh, type(style).__name__)
    layer.__class__ = parallel
    made = cast(ParallelLayer, layer)
    made.style, made.executions = style, ("chain",)
    names = list(made.format.cores)
    split = names[0] if made.from_right == by_outputs else names[-1]
    for name in names:
        _distribute(made, name, Shard(0) if name == split else Replicate(), mesh)
    if made.bias is not None:
        _distribute(made, "bias", Shard(0) if by_outputs else Replicate(), mesh)
    return made


def _parallel_class(layer: FactorizedLayer, mesh: DeviceMesh, style: str) -> type[ParallelLayer]:
    """Return the class of the split layer; raise if the layer cannot be split."""
    whole = "leave it out of the parallelize plan, so that every rank runs it whole"
    if any(isinstance(factor, DTensor) for factor in layer.factors):
        raise ValueError(f"{layer} is distributed already; call parallelize_module once, and before fully_shard")
    computed = [name for name in layer.format.cores if name not in dict(layer.named_parameters())]
    if computed:
        raise ValueError(
            f"{computed[0]} of {layer} is not a parameter: a parametrization or pruning computes it. Make it one again "
            f"(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove), or {whole}"
        )
    parallel = _PARALLEL.get(type(layer))
    if parallel is None:
        raise ValueError(f"{style} splits linears and embeddings, got {layer}; {whole}")
    if not layer.format.is_product:
        raise ValueError(f"{style} splits products U Vᵀ, got {layer}; factorize it with fz.LowRank(), or {whole}")
    if layer.execution not in ("auto", "chain"):
        raise ValueError(f'{style} runs a layer as a chain, got {layer}; set its execution to "auto", or {whole}')
    if layer.sparse:
        raise ValueError(f"{style} gives dense gradients, got sparse=True of {layer}; use sparse=False, or {whole}")
    if mesh.ndim != 1:
        raise ValueError(f'device_mesh must have one dimension, got {mesh}; pass one of them, such as mesh["tp"]')
    if layer.drop_connect:
        _refuse_drops(layer)
    return parallel


def _refuse_drops(layer: FactorizedLayer) -> NoReturn:
    raise ValueError(
        f"drop_connect={layer.drop_connect} of {layer} acts on the composed weight, which tensor parallelism does not "
        "form; call fz.drop_connect(model, 0), or leave the layer out of the parallelize plan"
    )


def _distribute(layer: ParallelLayer, name: str, placement: Placement, mesh: DeviceMesh) -> None:
    """Distribute one parameter of a layer; layers that shared it still do."""
    parameter = layer.get_parameter(name)
    made: nn.Parameter | None = vars(parameter).get(_DISTRIBUTED)
    if made is None:
        source = layer.style.src_data_rank
        value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
        made = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
        setattr(parameter, _DISTRIBUTED, made)
    if cast(DTensor, made).placements != (placement,):
        raise ValueError(
            f"{name} of {layer} would be {placement}, but a layer that shares it has it as "
            f"{cast(DTensor, made).placements[0]}; use RowwiseParallel for an embedding and ColwiseParallel for the "
            "linear tied to it"
        )
    holder, _, last = name.rpartition(".")
    layer.get_submodule(holder).register_parameter(last, made)


def _own(tensor: DTensor, sums_gradient: bool = False) -> Tensor:
    """Return this rank's part of a tensor; ``sums_gradient`` where its gradient has to be summed over ranks."""
    placed = tensor.placements[0]
    local = tensor.to_local(grad_placements=[Replicate() if placed.is_partial() else placed])
    return _travel(local, tensor, tensor.shape, placed, placed, gradient=Partial()) if sums_gradient else local


def _travel(
    local: Tensor, like: DTensor, shape: Sequence[int], before: Placement, after: Placement, *, gradient: Placement
) -> Tensor:
    """Move a tensor from placement ``before`` to ``after``; ``gradient`` is the placement of its gradient.

    ``like`` has the mesh, ``shape`` is the shape of the whole tensor.
    """
    if before == after == gradient:
        return local
    placed = _placed(local, like, shape, before)
    return placed.redistribute(placements=[after]).to_local(grad_placements=[gradient])


def _placed(local: Tensor, like: DTensor, shape: Sequence[int], placement: Placement) -> DTensor:
    """Return the distributed tensor of ``shape`` whose part on this rank is ``local``."""
    stride = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(
        local, like.device_mesh, [placement], run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
