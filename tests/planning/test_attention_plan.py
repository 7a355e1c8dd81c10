from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.planning.cost import measure
from tests.attention.attention_zoo import (
    BERT,
    GPT2,
    HUGGING_FACE,
    LLAMA,
    MARIAN,
    TORCH,
    Kind,
    OwnAttention,
    every_kind,
    tokens,
)

pytestmark = pytest.mark.usefixtures("own_attention")


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def inputs(kind: Kind) -> tuple[Any, ...] | dict[str, Any]:
    """Return the example input that the kind's own ``run`` gives its model."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    model = kind.make()
    handle = model.register_forward_pre_hook(lambda _, args, keys: seen.append((args, keys)), with_kwargs=True)
    kind.run(model)
    handle.remove()
    ((arguments, keywords),) = seen
    return {"input_ids": arguments[0], **keywords} if keywords else arguments


@every_kind
def test_attention_is_one_entry_with_its_heads_and_its_share(kind: Kind) -> None:
    model = kind.make()
    host = nn.ModuleDict({"m": model, "up": nn.Linear(8, 64), "mid": nn.Linear(64, 64), "down": nn.Linear(64, 8)})
    plan = fz.plan(host, rank=2, attention=False)
    found = {entry.name: entry for entry in plan.entries if entry.is_attention}
    assert set(found) == {f"m.{name}" for name in kind.attention}
    for name, entry in found.items():
        heads = 6 if kind.groups > 1 else 3
        assert entry.shape == (heads, 8)
        assert entry.head_ranks == (8, 8)
        assert entry.rank is None
        assert entry.reason == "attention=False leaves attention as it is"
        weights = {factor.parameter for form in fz.forms(host) for factor in form.factors if form.name[:-3] == name}
        assert entry.params >= sum(weight.numel() for weight in weights)
        assert not any(other.name.startswith(f"{name}.") for other in plan.entries)
    assert re.search(r"attention +\d+\.\d% of the parameters +-> +\d+\.\d% after", str(plan))


@every_kind
def test_the_planned_parameters_and_macs_are_those_of_the_shrunk_model(kind: Kind) -> None:
    model = kind.make()
    example = inputs(kind)
    plan = fz.plan(model, rank_scale=0.5, attention="heads", example_input=example, include=list(kind.attention))
    assert plan.macs is not None
    assert [entry.name for entry in plan.selected] == list(kind.attention)
    assert {entry.head_ranks for entry in plan.selected} == {(8, 4) if kind.rotary else (4, 4)}
    assert {entry.forms for entry in plan.selected} == {kind.forms}
    fz.factorize(model, plan)
    assert count(model) == plan.params_after
    assert measure(model, example, {}).macs == plan.macs_after


@pytest.mark.parametrize("kind", [BERT, MARIAN, GPT2, LLAMA], ids=lambda kind: kind.name)
@pytest.mark.parametrize("allocate", ["uniform", "spectrum"])
@pytest.mark.parametrize("ratio", [0.8, 0.5, 0.35])
def test_a_ratio_is_spent_over_linears_embeddings_and_attention(kind: Kind, allocate: Any, ratio: float) -> None:
    model = kind.make()
    dense = count(model)
    plan = fz.plan(model, ratio=ratio, attention="heads", keep_first_and_last=False, allocate=allocate)
    fz.factorize(model, plan)
    assert count(model) == plan.params_after <= ratio * dense
    assert plan.params_after > (ratio - 0.05) * dense
    kinds = {entry.type for entry in plan.selected}
    assert any("Attention" in name for name in kinds)
    assert ratio == 0.8 or kinds & {"Linear", "Conv1D"}
    assert kind.run(model).isfinite().all()


@pytest.mark.parametrize("kind", [TORCH[0], BERT, LLAMA], ids=lambda kind: kind.name)
def test_energy_keeps_the_share_of_the_squared_spectrum(kind: Kind) -> None:
    shares = {}
    for energy in (0.3, 0.6, 0.8):
        plan = fz.plan(kind.make(), energy=energy, attention="heads", include=list(kind.attention))
        shares[energy] = plan.selected[0].rank
    assert 1 <= shares[0.3] < shares[0.6] < shares[0.8] < 8


def test_macs_are_a_budget_for_attention_too() -> None:
    model = GPT2.make()
    plan = fz.plan(model, macs=0.5, example_input=tokens(), attention="heads", keep_first_and_last=False)
    assert plan.attention
    fz.factorize(model, plan)
    assert measure(model, tokens(), {}).macs == plan.macs_after
    assert plan.macs is not None
    assert plan.macs_after is not None
    assert plan.macs_after <= 0.5 * plan.macs


def test_one_form_alone_can_be_shrunk() -> None:
    plan = fz.plan(BERT.make(), rank_scale=0.25, attention=("ov",), include=["*attention"])
    assert plan.selected[0].head_ranks == (8, 2)
    assert "qk 8, ov 2" in str(plan)
    assert "qk 8, ov 2" in plan.to_html()


def test_a_plan_with_attention_goes_through_json_and_rebuilds_the_same() -> None:
    plan = fz.plan(BERT.make(), ratio=0.6, attention="heads")
    again = fz.Plan.from_dict(plan.to_dict())
    assert again == plan
    one, other = fz.factorize(BERT.make(), plan), fz.factorize(BERT.make(), again)
    assert torch.equal(BERT.run(one), BERT.run(other))


def test_a_plan_for_other_heads_is_refused() -> None:
    plan = fz.plan(BERT.make(), rank_scale=0.5, attention="heads", include=["*attention"])
    other = BERT.make()
    inner = other.encoder.layer[0].attention.self
    inner.config.num_attention_heads, inner.attention_head_size = 6, 4
    with pytest.raises(ValueError, match="has 6 heads of 4, not"):
        fz.factorize(other, plan)
    with pytest.raises(ValueError, match="is not an attention module that can be shrunk"):
        fz.factorize(fz.factorize(BERT.make(), plan), plan)


@pytest.mark.parametrize("pattern", ["*.encoder_attn", "*.encoder_attn.k_proj"])
def test_excluded_attention_stays_as_it_is(pattern: str) -> None:
    plan = fz.plan(MARIAN.make(), rank_scale=0.5, attention="heads", exclude=[pattern])
    reasons = {entry.name: entry.reason for entry in plan.entries if entry.is_attention}
    assert reasons["model.decoder.layers.0.encoder_attn"] == "in exclude="
    assert reasons["model.decoder.layers.0.self_attn"] is None


@pytest.mark.parametrize("kind", HUGGING_FACE, ids=lambda kind: kind.name)
def test_linears_inside_attention_that_is_one_thing_are_not_layers(kind: Kind) -> None:
    model = kind.make()
    for attention in ("heads", False):
        plan = fz.plan(model, rank=2, keep_first_and_last=False, attention=attention)
        inside = [entry.name for entry in plan.entries for name in kind.attention if entry.name.startswith(f"{name}.")]
        assert inside == []
        assert any(entry.type in ("Linear", "Conv1D") for entry in plan.selected)


class StrangeAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(16, 48), nn.Linear(16, 16)


def test_linears_inside_attention_that_nobody_registered_wait_to_be_named() -> None:
    model = nn.Sequential(nn.Linear(16, 16), StrangeAttention(), nn.Linear(16, 16), nn.Linear(16, 16))
    for attention, reason in {"heads": "this class of attention is not registered", False: "attention=False"}.items():
        plan = fz.plan(model, rank=2, attention=attention)
        assert [entry.name for entry in plan.entries] == ["0", "1", "2", "3"]
        assert reason in (plan.entries[1].reason or "")
        assert plan.entries[1].params == count(model[1])
        assert [entry.name for entry in plan.selected] == ["2"]
        named = fz.plan(model, rank=2, include=["1.to_qkv"], attention=attention)
        assert [entry.name for entry in named.selected] == ["1.to_qkv"]
    assert [entry.name for entry in fz.plan(model, rank=2).selected] == ["1.to_qkv", "1.to_out", "2"]


class KeysFirst(nn.Module):
    """Attention of one sequence to another, whose keys are projected before the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        k, v, q = (
            layer(t).unflatten(-1, (2, 4)).transpose(1, 2) for layer, t in ((self.k, y), (self.v, y), (self.q, x))
        )
        return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def test_macs_are_counted_whichever_projection_comes_first() -> None:
    fz.register_attention(KeysFirst, query="q", key="k", value="v", output="o", heads="heads")
    given = (torch.zeros(3, 5, 8), torch.zeros(3, 7, 8))
    entry = fz.plan(KeysFirst(), rank=2, attention="heads", example_input=given).entries[0]
    assert entry.macs == 3 * ((5 + 7) * 2 * 8 * 8 + 5 * 7 * 2 * 8)


def test_a_layer_that_is_a_projection_as_well_is_left_alone() -> None:
    model = MARIAN.make()
    model.model.decoder.layers[0].fc3 = model.model.encoder.layers[0].self_attn.v_proj
    plan = fz.plan(model, rank=2, attention=False)
    reasons = {entry.name: entry.reason or "" for entry in plan.entries}
    assert "is also model.encoder.layers.0.self_attn.v_proj, a part of" in reasons["model.decoder.layers.0.fc3"]
    fz.factorize(model, plan)
    assert model.model.decoder.layers[0].fc3 is model.model.encoder.layers[0].self_attn.v_proj


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rank": 9, "attention": "heads", "include": ["*attention"]},
            "rank must be in 1..8 for the heads of",
        ),
        ({"rank": 2, "attention": ("kq",)}, 'attention must be "layers", "heads", False or a list of "qk" and "ov"'),
        ({"rank": 2, "attention": "qk"}, 'attention must be "layers", "heads", False or a list of "qk" and "ov"'),
        ({"rank": 2, "attention": 3}, 'attention must be "layers", "heads", False or a list of "qk" and "ov", got 3'),
        ({"rank": 2, "attention": True}, '"heads", False or a list of "qk" and "ov", got True'),
        ({"rank": 2, "attention": ()}, r'a list of "qk" and "ov", got \(\)'),
        ({"rank": 2, "attention": "heads", "scheme": fz.Overcomplete()}, "which is for LowRank"),
        ({"ratio": 0.01, "attention": False}, 'keep_first_and_last=False would reach .*, attention="layers" 0'),
    ],
)
def test_wrong_input_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.plan(BERT.make(), **arguments)


def test_asking_for_queries_and_keys_alone_under_rotary_embeddings_says_why_not() -> None:
    plan = fz.plan(LLAMA.make(), rank_scale=0.5, attention=("qk",))
    reasons = [entry.reason or "" for entry in plan.entries if entry.is_attention]
    assert "rotary embeddings rotate its queries and keys" in reasons[0]


def test_heads_that_keep_their_size_say_so() -> None:
    model = nn.Sequential(OwnAttention(), nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    plan = fz.plan(model, rank=8, attention="heads")
    (entry,) = (entry for entry in plan.entries if entry.is_attention)
    assert entry.reason == "at that rank its heads keep their size"


def test_spectra_need_weights_that_are_there_and_finite() -> None:
    model = BERT.make()
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.weight[0, 0] = float("inf")
    for broken in (model, BERT.make().to("meta")):
        with pytest.raises(ValueError, match="singular values need weights"):
            fz.plan(broken, energy=0.5, attention="heads", include=["*attention"])


def test_attention_is_planned_on_the_meta_device() -> None:
    plan = fz.plan(BERT.make().to("meta"), ratio=0.5, attention="heads", keep_first_and_last=False)
    assert plan.attention
