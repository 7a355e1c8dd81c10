"""Count what training a transformer keeps, computes and sends, from the shapes of its parameters; any device will do.

``read`` lists the parameters and matrices of a model. Everything else here is arithmetic on that list. The formulas are
in ``docs/scale.md``; ``tests/distributed/test_counted_bytes.py`` compares the bytes with what gloo processes send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

from torch import nn

import factorized as fz

Split = Literal["columns", "rows"]
Decay = Literal["none", "products", "ov"]

# How tensor parallelism splits the layers of transformers' Llama and BERT.
COLUMNS = ("*.[qkv]_proj", "*.gate_proj", "*.up_proj", "lm_head", "*.query", "*.key", "*.value")
COLUMNS += ("*.intermediate.dense", "*.decoder")
ROWS = ("*.o_proj", "*.down_proj", "*.embed_tokens", "*.layer.*.output.dense", "*.word_embeddings")


@dataclass(frozen=True)
class Matrix:
    """A linear layer or a table of embeddings, dense or a product."""

    name: str
    outputs: int
    inputs: int  # of a table, its entries
    rank: int | None  # None: dense
    split: Split | None  # None: every rank of tensor parallelism has it whole
    is_table: bool

    def multiplied(self, ranks: int = 1) -> float:
        """Return the weights that a token meets on one rank of tensor parallelism."""
        into, out = (ranks if self.split == way else 1 for way in ("rows", "columns"))
        if self.rank is None:
            return 0 if self.is_table else self.inputs * self.outputs / (into * out)
        return self.rank * ((0 if self.is_table else self.inputs / into) + self.outputs / out)


@dataclass(frozen=True)
class Weight:
    """A parameter."""

    shape: tuple[int, ...]
    block: str  # the transformer block that holds it, which FSDP2 gathers at once; "" for everything else
    split: int | None  # the dimension that tensor parallelism splits

    def local(self, ranks: int) -> tuple[int, ...]:
        """Return the shape of what one rank of tensor parallelism has of it."""
        return tuple(-(-size // ranks) if dim == self.split else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class Counted:
    """A transformer in numbers."""

    weights: tuple[Weight, ...]
    matrices: tuple[Matrix, ...]
    blocks: int
    hidden: int
    attention: int  # all heads together
    heads: int
    feed_forward: int
    vocabulary: int
    is_decoder: bool  # causal, with a gated feed-forward, as Llama; else as BERT

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return self.held()

    @property
    def products(self) -> list[Matrix]:
        """The matrices that are products."""
        return [matrix for matrix in self.matrices if matrix.rank is not None]

    def held(self, tp: int = 1, shards: int = 1) -> int:
        """Return the parameters of one GPU among ``tp`` ranks of tensor parallelism and ``shards`` of FSDP2."""
        return sum(_padded(weight.local(tp), shards) for weight in self.weights) // shards

    def by_block(self, tp: int, shards: int) -> dict[str, int]:
        """Return the parameters that FSDP2 gathers at once, padded as it does; "" are those outside of the blocks."""
        sizes: dict[str, int] = defaultdict(int)
        for weight in self.weights:
            sizes[weight.block] += _padded(weight.local(tp), shards)
        return dict(sizes)

    def saved(self, tp: int = 1, splits_tokens: bool = False) -> float:
        """Return the numbers a token that one GPU keeps in the blocks from the forward to the backward pass."""
        wide = (4 if self.is_decoder else 2) * self.feed_forward + 4 * self.attention
        thin = sum((m.rank or 0) / (tp if splits_tokens and m.split == "rows" else 1) for m in self.products)
        if not splits_tokens:
            return self.blocks * (4 * self.hidden + wide / tp) + thin
        # dense layers keep the two inputs that they have gathered, products gather thin tensors instead
        gathered = 0 if self.products else 2 * self.hidden * (1 - 1 / tp)
        return self.blocks * (4 * self.hidden / tp + gathered + wide / tp) + thin

    def operations(self, length: int, tp: int = 1, splits_tokens: bool = False) -> float:
        """Return the floating-point operations a token of one GPU, forward and backward."""
        matrices = sum(matrix.multiplied(1 if splits_tokens else tp) for matrix in self.matrices)
        scores = (6 if self.is_decoder else 12) * length * self.attention * self.blocks / tp
        return 6 * matrices / (tp if splits_tokens else 1) + scores

    def sent_by_tokens(self, tp: int, sums_first: bool = False) -> int:
        """Return the numbers a token that tensor parallelism sums over its ranks.

        ``sums_first``: dense layers that share an input sum its gradients before they send them.
        """
        if tp == 1:
            return 0
        by_rows = [matrix.rank or matrix.outputs for matrix in self.matrices if matrix.split == "rows"]
        by_columns = [matrix for matrix in self.matrices if matrix.split == "columns"]
        thin = [matrix.rank for matrix in by_columns if matrix.rank is not None]
        wide = [(matrix.name.rpartition(".")[0], matrix.inputs) for matrix in by_columns if matrix.rank is None]
        wide = list(dict(wide).items()) if sums_first else wide  # those that share an input have one parent
        return sum(by_rows) + sum(thin) + sum(size for _, size in wide)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the collectives of one rank are given; of what is gathered or scattered, the whole tensor's."""

    gathered: float = 0
    scattered: float = 0
    summed: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.gathered + other.gathered, self.scattered + other.scattered, self.summed + other.summed)

    def times(self, count: float) -> Traffic:
        """Return the traffic of ``count`` such passes."""
        return Traffic(self.gathered * count, self.scattered * count, self.summed * count)

    def sent(self, ranks: int) -> float:
        """Return the bytes that one of ``ranks`` sends in rings; an all-reduce scatters, then gathers."""
        return (ranks - 1) / ranks * (self.gathered + self.scattered + 2 * self.summed)


def read(model: nn.Module) -> Counted:
    """Return the numbers of transformers' Llama or BERT, dense or factorized."""
    config, matrices = model.config, []
    split_dims: dict[nn.Parameter, int] = {}
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding | fz.FactorizedEmbedding)
        if not is_table and not isinstance(module, nn.Linear | fz.FactorizedLinear):
            continue
        split = split_of(name)
        sizes = ("embedding_dim", "num_embeddings") if is_table else ("out_features", "in_features")
        outputs, inputs = (getattr(module, size) for size in sizes)
        rank = module.rank if isinstance(module, fz.FactorizedLinear | fz.FactorizedEmbedding) else None
        matrices.append(Matrix(name, outputs, inputs, rank, split, is_table))
        split_dims |= _split_dims(module, split, is_table)
    names = [(name, parameter) for name, parameter in model.named_parameters()]
    blocks = [_block_of(name) for name, _ in names]
    query = next(matrix for matrix in matrices if matrix.name.endswith(("q_proj", "query")))
    return Counted(
        weights=tuple(
            Weight(tuple(parameter.shape), block, split_dims.get(parameter))
            for (_, parameter), block in zip(names, blocks, strict=True)
        ),
        matrices=tuple(matrices),
        blocks=len(set(blocks) - {""}),
        hidden=config.hidden_size,
        attention=query.outputs,
        heads=config.num_attention_heads,
        feed_forward=config.intermediate_size,
        vocabulary=config.vocab_size,
        is_decoder=query.name.endswith("q_proj"),
    )


def split_of(name: str) -> Split | None:
    """Return how tensor parallelism splits the layer of this name."""
    if any(fnmatchcase(name, pattern) for pattern in COLUMNS):
        return "columns"
    return "rows" if any(fnmatchcase(name, pattern) for pattern in ROWS) else None


def replicated(counted: Counted) -> Traffic:
    """Return what DDP sends in a step: gradients in float32."""
    return Traffic(summed=4 * counted.parameters)


def sharded(counted: Counted, shards: int, tp: int = 1) -> Traffic:
    """Return what FSDP2 sends for a forward and a backward pass: weights in bfloat16, gradients in float32.

    Blocks are gathered for either pass; what is outside of them is kept from the first to the second.
    """
    if shards == 1:
        return Traffic()
    sizes = counted.by_block(tp, shards)
    return Traffic(gathered=2 * (2 * sum(sizes.values()) - sizes[""]), scattered=4 * sum(sizes.values()))


def tensor_parallel(counted: Counted, tp: int, tokens: int, sums_first: bool = False) -> Traffic:
    """Return what tensor parallelism sends for so many tokens: activations and their gradients in bfloat16."""
    return Traffic(summed=2 * tokens * counted.sent_by_tokens(tp, sums_first))


def tokens_split(counted: Counted, tp: int, tokens: int, sums_first: bool = False, passes: int = 1) -> Traffic:
    """Return the same where tokens are split outside of the layers: what was summed is scattered and gathered.

    A replicated factor then sees a part of the tokens on every rank: its gradient is summed in every backward pass.
    """
    numbers = 2 * tokens * counted.sent_by_tokens(tp, sums_first)
    replicated = sum(
        (m.rank or 0) * (m.inputs if m.split == "columns" else m.outputs) for m in counted.products if m.split
    )
    return Traffic(numbers, numbers, 2 * passes * replicated if tp > 1 else 0)


def decay_over_shards(counted: Counted, decay: Decay, shards: int, tp: int = 1) -> Traffic:
    """Return what Frobenius decay sends in a step over the ranks of FSDP2, in float32."""
    if shards == 1 or decay == "none":
        return Traffic()
    if decay == "products":
        return Traffic(summed=4 * sum(2 * (matrix.rank or 0) ** 2 for matrix in counted.products))
    size = counted.attention // counted.heads
    values = counted.blocks * _padded((counted.attention // tp, counted.hidden), shards)
    return Traffic(gathered=4 * values, summed=4 * counted.blocks * counted.heads // tp * size**2)


def decay_over_parts(counted: Counted, decay: Decay, tp: int) -> Traffic:
    """Return what Frobenius decay sends in a step over the ranks of tensor parallelism, in float32."""
    if tp == 1 or decay != "products":
        return Traffic()  # every rank has its own heads
    return Traffic(summed=4 * sum((matrix.rank or 0) ** 2 for matrix in counted.products if matrix.split))


def lamb_norms(counted: Counted, shards: int) -> Traffic:
    """Return what LAMB sends in a step over the ranks of FSDP2: norms of gradient, weight and update."""
    return Traffic(summed=4 * 3 * len(counted.weights)) if shards > 1 else Traffic()


def decay_operations(counted: Counted, decay: Decay, shards: int = 1, tp: int = 1) -> float:
    """Return the operations of one Frobenius decay on one GPU.

    Of a product these are two Gram matrices, and either factor times the Gram matrix of the other.
    """
    if decay == "products":
        return sum(4 * (m.rank or 0) * m.multiplied(tp) for m in counted.products) / shards
    size = counted.attention // counted.heads
    return 8 * counted.blocks * counted.heads / tp * counted.hidden * size**2 if decay == "ov" else 0


def _padded(shape: Iterable[int], shards: int) -> int:
    """Return the numbers of all shards together: each has as many rows as the largest."""
    rows, *rest = shape
    return -(-rows // shards) * shards * prod(rest)


def _block_of(name: str) -> str:
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def _split_dims(module: nn.Module, split: Split | None, is_table: bool) -> dict[nn.Parameter, int]:
    """Return the parameters of a layer that tensor parallelism splits, and along which dimension."""
    if split is None:
        return {}
    factors = {name: parameter for name, parameter in module.named_parameters() if name in ("U", "V")}
    bias = {module.bias: 0} if split == "columns" and getattr(module, "bias", None) is not None else {}
    if factors:
        return {factors["U" if (split == "columns") != is_table else "V"]: 0, **bias}
    return {module.weight: 0 if (split == "columns") != is_table else 1, **bias}
