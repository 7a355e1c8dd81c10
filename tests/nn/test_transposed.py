from __future__ import annotations

import torch

import factorized as fz
from factorized.testing import error
from tests.attention.attention_zoo import GPT2


@torch.no_grad()
def test_gpt2s_feed_forward_layers_are_layers_of_the_plan_and_come_back_transposed() -> None:
    model = GPT2.make()
    plan = fz.plan(model, rank=8, include=["*.mlp.*"])
    assert {entry.type for entry in plan.selected} == {"Conv1D"}
    assert len(plan.selected) == 4
    fz.factorize(model, plan)
    expected = GPT2.run(model)
    composed = fz.compose(model)
    assert error(GPT2.run(composed), expected) < 1e-12
    assert type(composed.transformer.h[0].mlp.c_fc).__name__ == "Conv1D"
    assert composed.transformer.h[0].mlp.c_fc.weight.shape == (24, 96)
    lowered = fz.lower(model)
    assert error(GPT2.run(lowered), expected) < 1e-12
    assert [tuple(layer.weight.shape) for layer in lowered.transformer.h[0].mlp.c_fc] == [(8, 24), (96, 8)]


@torch.no_grad()
def test_a_dense_gpt2_checkpoint_fills_the_factors() -> None:
    dense = GPT2.make()
    model = fz.factorize(GPT2.build().double(), rank=19, include=["*.mlp.*"]).eval()
    fz.load_dense(model, dense.state_dict())
    expected = fz.factorize(dense, rank=19, include=["*.mlp.*"])
    assert error(GPT2.run(model), GPT2.run(expected)) < 1e-10


def test_its_macs_are_counted_by_its_inputs() -> None:
    model = GPT2.make()
    example = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    plan = fz.plan(model, rank=3, include=["*.c_fc"], example_input=example)
    assert plan.selected[0].macs == 2 * 5 * 24 * 96
    fz.factorize(model, plan)
    after = fz.plan(model, rank=1, include=["*.c_proj"], example_input=example)
    assert after.macs == plan.macs_after


def test_it_can_be_tuned() -> None:
    model = fz.factorize(GPT2.make(torch.float32), rank=3, include=["*.c_fc"])
    times = fz.autotune(model, torch.ones(2, 5, dtype=torch.long), rounds=1)
    assert set(times) == {"transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"}
