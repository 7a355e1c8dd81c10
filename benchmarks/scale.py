"""Write the tables of ``docs/scale.md``: memory, bytes and step times on many GPUs, computed and not measured.

python -m benchmarks.scale
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Literal

import torch
from torch import nn

import factorized as fz
from benchmarks.counting import (
    Counted,
    Decay,
    Traffic,
    decay_operations,
    decay_over_parts,
    decay_over_shards,
    lamb_norms,
    read,
    replicated,
    sharded,
    tensor_parallel,
    tokens_split,
)
from benchmarks.markdown import fill, table
from benchmarks.tables import ROOT

PAGE = ROOT / "docs" / "scale.md"
Way = Literal["DDP", "FSDP2", "TP", "TP, tokens split"]
WAYS: tuple[Way, ...] = ("DDP", "FSDP2", "TP", "TP, tokens split")
GPUS = (8, 64, 256, 1024)
ADAMW_BYTES, LAMB_BYTES = 28, 60  # that an update reads or writes for a parameter, as ``benchmarks.optimizers`` counts


@dataclass(frozen=True)
class Machine:
    """What is assumed of GPUs and the links between them."""

    memory: float = 141e9  # bytes
    operations: float = 989e12  # a second, bfloat16
    share: float = 0.4  # of them, which training reaches
    single: float = 50e12  # operations a second in float32, for the decay
    reads: float = 4.8e12  # bytes of memory a second
    nvlink: float = 450e9  # bytes a second that a GPU sends within its node
    network: float = 50e9  # and to other nodes
    node: int = 8  # GPUs


@dataclass(frozen=True)
class Training:
    """What a model is trained on in a step."""

    sequences: int  # in a batch of all GPUs
    length: int
    micro: int  # sequences for each GPU that a replica of the model takes at once


@dataclass(frozen=True)
class Variant:
    """A model and what trains it."""

    name: str
    build: Callable[[], nn.Module]
    training: Training
    decay: Decay = "none"
    is_lamb: bool = False

    def counted(self) -> Counted:
        """Return the model in numbers."""
        return _count(self.build)


@dataclass(frozen=True)
class Step:
    """A training step of one GPU: bytes held, bytes sent, seconds."""

    memory: float
    sent: float
    compute: float
    data: float  # seconds of sending weights and gradients, which may run beside the computation
    rest: float  # seconds of what waits: tensor parallelism, decay, optimizer

    @property
    def fastest(self) -> float:
        """Seconds, if weights and gradients travel while the GPU computes."""
        return max(self.compute, self.data) + self.rest

    @property
    def slowest(self) -> float:
        """Seconds, if nothing overlaps."""
        return self.compute + self.data + self.rest


@cache
def step(variant: Variant, way: Way, gpus: int) -> Step:
    """Return what a training step takes of every GPU."""
    machine, counted, training = Machine(), variant.counted(), variant.training
    tp = machine.node if way.startswith("TP") else 1
    splits_tokens = way == "TP, tokens split"
    replicas = gpus // tp
    shards = 1 if way == "DDP" else replicas
    passes = max(1, training.sequences // (gpus * training.micro))
    tokens = training.sequences * training.length // replicas

    data = replicated(counted) if way == "DDP" else sharded(counted, shards, tp).times(passes)
    decayed = decay_over_shards(counted, variant.decay, shards, tp)
    decayed += lamb_norms(counted, shards) if variant.is_lamb else Traffic()
    within = decay_over_parts(counted, variant.decay, tp)
    if splits_tokens:
        within += tokens_split(counted, tp, tokens, sums_first=True, passes=passes)
    else:
        within += tensor_parallel(counted, tp, tokens, sums_first=True)

    side_by_side = machine.node // tp  # of a group that shares gradients, on one node
    held = counted.held(tp, shards)
    rest = [
        seconds(within, tp, tp, machine),
        seconds(decayed, replicas, side_by_side, machine),
        decay_operations(counted, variant.decay, shards, tp) / machine.single,
        (LAMB_BYTES if variant.is_lamb else ADAMW_BYTES) * held / machine.reads,
    ]
    return Step(
        memory=state_bytes(counted, shards, tp)
        + activation_bytes(counted, training.micro * tp * training.length, tp, splits_tokens),
        sent=data.sent(replicas) + decayed.sent(replicas) + within.sent(tp),
        compute=counted.operations(training.length, tp, splits_tokens) * tokens / (machine.share * machine.operations),
        data=seconds(data, replicas, side_by_side, machine),
        rest=sum(rest),
    )


def state_bytes(counted: Counted, shards: int, tp: int) -> float:
    """Return the bytes of weights, gradients and moments of one GPU."""
    if shards == 1:
        return 18 * counted.held(tp)  # float32 each, and weights in bfloat16
    sizes = counted.by_block(tp, shards)
    block = max(size for name, size in sizes.items() if name)
    return 16 * counted.held(tp, shards) + 2 * (sizes[""] + 2 * block) + 6 * block


def activation_bytes(counted: Counted, tokens: int, tp: int, splits_tokens: bool) -> float:
    """Return the bytes that a forward pass keeps: bfloat16, and logits in float32 too."""
    return tokens * (2 * counted.saved(tp, splits_tokens) + 6 * counted.vocabulary / tp)


def seconds(traffic: Traffic, ranks: int, side_by_side: int, machine: Machine) -> float:
    """Return how long collectives of ``ranks`` GPUs take, ``side_by_side`` of them on every node."""
    nodes = max(1, ranks // side_by_side)
    near = min(ranks, side_by_side)
    passed = traffic.gathered + traffic.scattered + 2 * traffic.summed
    within, between = passed * (near - 1) / near, passed / near * (nodes - 1) / nodes
    return max(within / machine.nvlink, between / machine.network)


def llama() -> nn.Module:
    """Return the decoder of 7 billion parameters, on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
        max_position_embeddings=4096,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def bert() -> nn.Module:
    """Return BERT-large, on the meta device."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
    with torch.device("meta"):
        return BertForMaskedLM(config)


def half_decoder() -> nn.Module:
    """Return the decoder with half of its parameters."""
    return fz.factorize(llama(), fz.LowRank(), ratio=0.5, include=["model.layers"], init="default")


def quarter_decoder() -> nn.Module:
    """Return the decoder with a quarter of its parameters."""
    return fz.factorize(llama(), fz.LowRank(), ratio=0.25, include=["model.layers"], init="default")


def half_bert() -> nn.Module:
    """Return BERT-large with half of its parameters."""
    return fz.factorize(bert(), fz.LowRank(), ratio=0.5, include=["bert.encoder"], init="default")


def half_attention() -> nn.Module:
    """Return BERT-large with half the attention dimension."""
    return fz.factorize(bert(), rank_scale=0.5, attention="heads", include=["*attention"], init="default")


@cache
def _count(build: Callable[[], nn.Module]) -> Counted:
    return read(build())


PHASE_1 = Training(sequences=65_536, length=128, micro=64)
DECODER = Training(sequences=1_024, length=4_096, micro=1)
BERTS = (
    Variant("LAMB", bert, PHASE_1, is_lamb=True),
    Variant("FLAMBé", bert, PHASE_1, "ov", is_lamb=True),
    Variant("FLAMBé, attention ×0.5", half_attention, PHASE_1, "ov", is_lamb=True),
    Variant("FLAMBé, low rank 0.5", half_bert, PHASE_1, "products", is_lamb=True),
)
DECODERS = (
    Variant("dense", llama, DECODER),
    Variant("low rank 0.5", half_decoder, DECODER),
    Variant("low rank 0.5, Frobenius decay", half_decoder, DECODER, "products"),
    Variant("low rank 0.25, Frobenius decay", quarter_decoder, DECODER, "products"),
)


def assumptions() -> str:
    """Return the table of what is assumed of the machines."""
    m = Machine()
    rows = [
        ("memory of a GPU", f"{m.memory / 1e9:.0f} GB"),
        ("peak in bfloat16, dense", f"{m.operations / 1e12:.0f} TFLOP/s"),
        ("share of this peak that a training step reaches", f"{m.share:.0%}"),
        ("products in float32, for the decay", f"{m.single / 1e12:.0f} TFLOP/s"),
        ("memory read or written", f"{m.reads / 1e12:.1f} TB/s"),
        ("GPUs in a node", f"{m.node}"),
        ("NVLink within a node, each GPU in each direction", f"{m.nvlink / 1e9:.0f} GB/s"),
        ("network between nodes, each GPU in each direction", f"{m.network / 1e9:.0f} GB/s"),
    ]
    return table(["assumed, not measured", ""], rows)


def measured_share() -> str:
    """Return the table of which share of the peak a product reached on one GPU."""
    report = json.loads((ROOT / "benchmarks" / "results" / "multiples-h200.json").read_text())
    rows = [row for row in report["rows"] if row["rank"] in (64, 128, 256, 512) and row["inputs"] == 2048]
    shares = [
        6
        * row["rank"]
        * (row["inputs"] + row["outputs"])
        * report["tokens"]
        / (row["milliseconds"] / 1e3 * Machine().operations)
        for row in rows
    ]
    cells = [f"share of {Machine().operations / 1e12:.0f} TFLOP/s", *(f"{share:.2f}" for share in shares)]
    note = (
        f"One 2048×5632 product on {report['tokens']:,} tokens, forward and backward in bfloat16; "
        f"{report['machine']['device']}, torch {report['machine']['torch']}."
    )
    return table(["rank", *(str(row["rank"]) for row in rows)], [cells], note)


def sizes(variants: tuple[Variant, ...]) -> str:
    """Return the table of what is counted of each variant, whatever it runs on."""
    operated = ["GFLOP a token", "on one of 8 TP ranks", "the same, tokens split"]
    sent_by = ["TP, bytes a token", "where dense layers sum first"]
    decayed = ["decay, GFLOP a step", "decay, MB a step under FSDP2"]
    rows = []
    for variant in variants:
        counted, length = variant.counted(), variant.training.length
        operations = [counted.operations(length, tp, splits) for tp, splits in ((1, False), (8, False), (8, True))]
        decay = decay_over_shards(counted, variant.decay, 64)
        ranks = sorted({matrix.rank for matrix in counted.products if matrix.rank is not None})
        cells = [
            variant.name,
            f"{counted.parameters:,}",
            " and ".join(map(str, ranks)),
            *(f"{each / 1e9:.2f}" for each in operations),
            *(f"{2 * counted.sent_by_tokens(8, sums_first):,}" for sums_first in (False, True)),
            f"{decay_operations(counted, variant.decay) / 1e9:,.0f}" if variant.decay != "none" else "",
            f"{(decay.gathered + decay.summed) / 1e6:,.0f}" if variant.decay != "none" else "",
        ]
        rows.append(cells)
    return table(["", "parameters", "ranks", *operated, *sent_by, *decayed], rows)


def over_gpus(variants: tuple[Variant, ...], cell: Callable[[Step], str]) -> str:
    """Return a table with a column for each number of GPUs."""
    rows = [
        [way, variant.name, *(cell(step(variant, way, gpus)) for gpus in GPUS)] for way in WAYS for variant in variants
    ]
    return table(["", "", *(f"{n:,} GPUs" for n in GPUS)], rows, names=2)


def memory(found: Step) -> str:
    """Return gigabytes, or that they do not fit."""
    text = f"{found.memory / 1e9:.1f}"
    return text if found.memory <= Machine().memory else f"({text})"


def sent(found: Step) -> str:
    """Return gigabytes."""
    return _three_digits(found.sent / 1e9)


def time(found: Step) -> str:
    """Return seconds, with overlap and without."""
    return f"{_three_digits(found.fastest)} to {_three_digits(found.slowest)}"


def _three_digits(number: float) -> str:
    whole = len(str(int(number))) if number >= 1 else 0
    return f"{number:.{max(0, 3 - whole)}f}"


TABLES: dict[str, Callable[[], str]] = {"assumptions": assumptions, "measured-share": measured_share} | {
    f"{model}-{name}": make
    for model, variants in (("bert", BERTS), ("decoder", DECODERS))
    for name, make in (
        ("sizes", lambda variants=variants: sizes(variants)),
        ("memory", lambda variants=variants: over_gpus(variants, memory)),
        ("sent", lambda variants=variants: over_gpus(variants, sent)),
        ("time", lambda variants=variants: over_gpus(variants, time)),
    )
}


def main() -> None:
    """Write the page, and print how long the largest model takes to plan and build."""
    PAGE.write_text(fill(PAGE.read_text(), TABLES))
    start = perf_counter()
    model = half_decoder()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"a decoder of {count:,} parameters, built, planned and factorized in {perf_counter() - start:.2f} s")


if __name__ == "__main__":
    main()
