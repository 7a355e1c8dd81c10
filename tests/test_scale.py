"""``docs/scale.md`` is what its script writes, and the script counts what a reader can count by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import factorized as fz
from benchmarks import scale
from benchmarks.counting import (
    Counted,
    Matrix,
    Traffic,
    Weight,
    decay_operations,
    decay_over_parts,
    decay_over_shards,
    replicated,
    sharded,
    tensor_parallel,
    tokens_split,
)
from benchmarks.markdown import fill
from benchmarks.scale import BERTS, DECODERS, Machine, activation_bytes, seconds, state_bytes, step

DENSE = Counted(
    weights=(Weight((10, 4), "", 0), Weight((8, 4), "0", 0), Weight((8, 4), "0", 0), Weight((4, 8), "0", 1)),
    matrices=(
        Matrix("embed_tokens", 4, 10, None, "rows", True),
        Matrix("0.mlp.gate_proj", 8, 4, None, "columns", False),
        Matrix("0.mlp.up_proj", 8, 4, None, "columns", False),
        Matrix("0.mlp.down_proj", 4, 8, None, "rows", False),
    ),
    blocks=1,
    hidden=4,
    attention=4,
    heads=2,
    feed_forward=8,
    vocabulary=10,
    is_decoder=True,
)
LOW = replace(
    DENSE,
    weights=(DENSE.weights[0], *[Weight((8, 2), "0", 0), Weight((4, 2), "0", None)] * 3),
    matrices=(DENSE.matrices[0], *(replace(matrix, rank=2) for matrix in DENSE.matrices[1:])),
)


def test_the_page_is_what_the_script_writes() -> None:
    page = scale.PAGE.read_text()
    assert fill(page, scale.TABLES) == page
    assert re.findall("<!-- table:(.*?) -->", page) == list(scale.TABLES)


def test_a_decoder_of_seven_billion_parameters_is_planned_and_factorized_without_memory() -> None:
    model = scale.llama()
    plan = fz.plan(model, fz.LowRank(), ratio=0.5, include=["model.layers"])
    fz.factorize(model, plan, init="default")
    assert plan.params == 6_738_415_616
    assert sum(parameter.numel() for parameter in model.parameters()) == plan.params_after <= plan.params / 2
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("variant", [*BERTS, *DECODERS], ids=lambda variant: variant.name)
def test_the_parameters_are_those_of_the_model(variant: scale.Variant) -> None:
    assert variant.counted().parameters == sum(parameter.numel() for parameter in variant.build().parameters())


def test_rings_send_a_tensor_once_to_gather_or_scatter_it_and_twice_to_sum_it() -> None:
    assert Traffic(gathered=100).sent(4) == Traffic(scattered=100).sent(4) == 75
    assert Traffic(summed=100).sent(4) == 150
    assert Traffic(summed=100).sent(1) == 0


def test_replicas_send_gradients_in_single_precision() -> None:
    assert replicated(DENSE) == Traffic(summed=4 * (40 + 3 * 32))
    assert replicated(LOW) == Traffic(summed=4 * (40 + 3 * 24))


def test_shards_gather_blocks_twice_and_pad_their_rows() -> None:
    assert sharded(DENSE, 1) == Traffic()
    assert sharded(DENSE, 2) == Traffic(gathered=2 * (40 + 2 * 96), scattered=4 * (40 + 96))
    assert sharded(DENSE, 8) == Traffic(gathered=2 * (64 + 2 * (32 + 32 + 64)), scattered=4 * (64 + 128))
    assert sharded(DENSE, 2, tp=2) == Traffic(gathered=2 * (24 + 2 * 48), scattered=4 * (24 + 48))


@pytest.mark.parametrize(
    ("model", "sums_first", "numbers"),
    [(DENSE, False, 4 + 4 + 4 + 4), (DENSE, True, 4 + 4 + 4), (LOW, False, 4 + 3 * 2), (LOW, True, 4 + 3 * 2)],
)
def test_tensor_parallelism_sends_widths_or_ranks(model: Counted, sums_first: bool, numbers: int) -> None:
    assert tensor_parallel(model, 1, 100, sums_first) == Traffic()
    assert tensor_parallel(model, 2, 100, sums_first) == Traffic(summed=2 * 100 * numbers)
    factors = 2 * 3 * 4 * 2 if model is LOW else 0  # replicated ones, whose gradients are summed
    assert tokens_split(model, 2, 100, sums_first) == Traffic(200 * numbers, 200 * numbers, factors)


def test_of_a_product_tensor_parallelism_divides_one_factor_unless_tokens_are_split() -> None:
    scores = 6 * 5 * 4
    assert DENSE.operations(5, 1) == 6 * 96 + scores
    assert DENSE.operations(5, 2) == (6 * 96 + scores) / 2
    assert LOW.operations(5, 2) == 6 * 3 * 2 * (4 + 8 / 2) + scores / 2
    assert LOW.operations(5, 2, splits_tokens=True) == LOW.operations(5, 1) / 2


def test_the_decay_sends_gram_matrices_and_gathers_values() -> None:
    assert decay_over_shards(LOW, "products", 4) == Traffic(summed=4 * 3 * 2 * 2**2)
    assert decay_over_parts(LOW, "products", 4) == Traffic(summed=4 * 3 * 2**2)
    assert decay_over_shards(DENSE, "ov", 4) == Traffic(gathered=4 * 4 * 4, summed=4 * 2 * 2**2)
    assert decay_over_parts(DENSE, "ov", 4) == decay_over_shards(LOW, "products", 1) == Traffic()
    assert decay_operations(LOW, "products") == 3 * 4 * 2**2 * 12


def test_memory_is_that_of_states_and_activations() -> None:
    assert state_bytes(DENSE, 1, 1) == 18 * 136
    assert state_bytes(DENSE, 2, 1) == 16 * 136 / 2 + 2 * 40 + (2 * 2 + 6) * 96
    assert activation_bytes(DENSE, 3, 1, False) == 3 * (2 * (16 + 16 + 32) + 60)
    assert activation_bytes(LOW, 3, 1, False) == 3 * (2 * (16 + 16 + 32 + 6) + 60)
    assert activation_bytes(DENSE, 3, 2, True) == 3 * (2 * (8 + 4 + 8 + 16) + 30)


def test_collectives_take_as_long_as_the_slower_of_two_links() -> None:
    machine = Machine(nvlink=100, network=10)
    assert seconds(Traffic(summed=800), 8, 8, machine) == pytest.approx(2 * 700 / 100)
    assert seconds(Traffic(gathered=800), 16, 8, machine) == pytest.approx(max(700 / 100, 50 / 10))
    assert seconds(Traffic(gathered=800), 4, 1, machine) == pytest.approx(600 / 10)


def test_more_gpus_take_less_time_and_never_less_without_overlap() -> None:
    for way in scale.WAYS:
        steps = [step(DECODERS[0], way, gpus) for gpus in scale.GPUS]
        assert [s.fastest for s in steps] == sorted((s.fastest for s in steps), reverse=True)
        assert all(s.fastest <= s.slowest for s in steps)
