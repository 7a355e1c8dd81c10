from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.attention.register import _registered, find_attention
from factorized.testing import error
from tests.attention.attention_zoo import BERT, GPT2, HUGGING_FACE, LLAMA, OWN, TORCH, Kind, OwnAttention, every_kind
from tests.models.unchanged import unchanged

pytestmark = pytest.mark.usefixtures("own_attention")
grows = pytest.mark.filterwarnings("ignore:lowered, .* has one head size for queries and values")


def shrunk(kind: Kind, unequal: bool = False) -> nn.Module:
    scales = {"qk": 0.75, "ov": 0.5} if unequal else {"qk": 0.5, "ov": 0.5}
    return fz.factorize_attention(kind.make(), {k: scales[k] for k in kind.forms}, forms=kind.forms)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@every_kind
@pytest.mark.parametrize("unequal", [False, True])
@torch.no_grad()
def test_composed_attention_has_its_dense_size_and_computes_the_same(kind: Kind, unequal: bool) -> None:
    model = shrunk(kind, unequal)
    before = deepcopy(model.state_dict())
    composed = fz.compose(model)
    assert error(kind.run(composed), kind.run(model)) < 1e-12
    assert shapes(composed) == shapes(kind.make())
    assert not any(type(module).__module__.startswith("factorized") for module in composed.modules())
    assert all(read.unit is not None and read.unit.shrunk is None for read in find_attention(composed))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@grows
@every_kind
@pytest.mark.parametrize("unequal", [False, True])
@torch.no_grad()
def test_lowered_attention_is_plain_with_the_smallest_heads_its_class_can_hold(kind: Kind, unequal: bool) -> None:
    model = shrunk(kind, unequal)
    lowered = fz.lower(model)
    assert error(kind.run(lowered), kind.run(model)) < 1e-12
    assert not any(type(module).__module__.startswith("factorized") for module in lowered.modules())
    sizes = {kind.name: 8 for kind in (*TORCH, OWN, LLAMA)} | {"mistral": 8}
    size = sizes.get(kind.name, 6 if unequal else 4)
    module = lowered.get_submodule(kind.attention[0])
    names = {"BertAttention": "self.attention_head_size", "RobertaAttention": "self.attention_head_size"}
    if kind in HUGGING_FACE:
        for attribute in names.get(type(module).__name__, "head_dim").split("."):
            module = getattr(module, attribute)
        assert module == size


@every_kind
@pytest.mark.parametrize("unequal", [False, True])
def test_lowered_attention_is_no_larger_or_says_so(kind: Kind, unequal: bool, recwarn: pytest.WarningsRecorder) -> None:
    model = shrunk(kind, unequal)
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, fz.lower(model)))
    packed = kind in TORCH or (unequal and "gpt2" in kind.name) or (unequal and kind is OWN)
    assert [str(warning.message).partition(":")[0].split(" ", 2)[-1] for warning in recwarn] == (
        [f"has {after:,} parameters, more than the factorized {before:,}"] if packed else []
    )
    assert (after > before) == packed


@every_kind
@pytest.mark.parametrize("unequal", [False, True])
@torch.no_grad()
def test_what_is_saved_loads_into_a_fresh_dense_model(kind: Kind, unequal: bool, tmp_path: Path) -> None:
    model = shrunk(kind, unequal)
    fz.save(model, tmp_path)
    torch.manual_seed(9)
    loaded = fz.load(tmp_path, kind.build().double().eval())
    assert shapes(loaded) == shapes(model)
    assert torch.equal(kind.run(loaded), kind.run(model))
    entries = fz.Plan.from_dict(json.loads((tmp_path / "plan.json").read_text())["plan"]).entries
    assert {entry.name for entry in entries} == set(kind.attention)


@every_kind
@torch.no_grad()
def test_a_state_dict_goes_from_one_shrunk_model_to_another(kind: Kind) -> None:
    model, other = shrunk(kind), shrunk(kind)
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(kind.run(other), kind.run(model))


@every_kind
@torch.no_grad()
def test_a_dense_checkpoint_fills_shrunk_heads_with_the_best_approximation(kind: Kind) -> None:
    dense = kind.make()
    state = deepcopy(dense.state_dict())
    model = shrunk(kind)
    for parameter in model.parameters():
        parameter.normal_()
    assert fz.load_dense(model, state) is model
    assert error(kind.run(model), kind.run(shrunk(kind))) < 1e-10


@pytest.mark.parametrize("kind", [BERT, TORCH[0]], ids=lambda kind: kind.name)
def test_a_dense_checkpoint_of_other_heads_is_refused(kind: Kind) -> None:
    model, state = shrunk(kind), kind.make().state_dict()
    before = deepcopy(model.state_dict())
    key = next(name for name in state if name.endswith(("value.weight", "in_proj_weight")))
    bias = next(name for name in state if name.endswith(("output.dense.bias", "out_proj.bias")))
    without = [{name: value for name, value in state.items() if name != missing} for missing in (key, bias)]
    for wrong in ({**state, key: state[key][:-1]}, *without):
        with pytest.raises(ValueError, match="does not fit the model"):
            fz.load_dense(model, wrong)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_checkpoint_does_not_load_into_a_model_of_other_heads(tmp_path: Path) -> None:
    fz.save(shrunk(BERT), tmp_path)
    other = BERT.make()
    inner = other.encoder.layer[0].attention.self
    inner.config.num_attention_heads, inner.attention_head_size = 6, 4
    before = list(other.modules())
    with pytest.raises(ValueError, match="6 heads of 4"):
        fz.load(tmp_path, other)
    assert list(other.modules()) == before


def test_a_model_on_the_meta_device_is_filled_too(tmp_path: Path) -> None:
    kind = TORCH[3]
    model = shrunk(kind, unequal=True)
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, kind.build().double().eval().to("meta"))
    assert torch.equal(kind.run(loaded), kind.run(model))


def test_a_checkpoint_of_attention_alone_holds_a_plan_of_low_rank(tmp_path: Path) -> None:
    fz.save(shrunk(BERT), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["scheme"]["name"] == "low_rank"


def test_layers_and_attention_are_saved_together(tmp_path: Path) -> None:
    model = fz.factorize(GPT2.make(), ratio=0.6, attention="heads", keep_first_and_last=False)
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, GPT2.build().double().eval())
    assert torch.equal(GPT2.run(loaded), GPT2.run(model))
    assert loaded.lm_head.U is loaded.transformer.wte.U


@grows
def test_a_shared_attention_module_is_saved_and_comes_back_shared(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        module = nn.MultiheadAttention(8, 2)
        return nn.ModuleList([module, module])

    fz.save(fz.factorize_attention(build()), tmp_path)
    loaded = fz.load(tmp_path, build())
    assert loaded[0] is loaded[1]
    for plain in (fz.compose(loaded), fz.lower(loaded)):
        assert plain[0] is plain[1]


@pytest.mark.parametrize("names", [("0.", "1."), ("0.",), ("1.",)])
@torch.no_grad()
def test_a_shared_attention_module_takes_a_dense_checkpoint_under_any_of_its_names(names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2)
    model = nn.ModuleList([module, module])
    state = {key: value.clone() for key, value in model.state_dict().items() if key.startswith(names)}
    expected = fz.factorize_attention(model)[0].state_dict()
    expected = {key: value.clone() for key, value in expected.items()}
    for parameter in model.parameters():
        parameter.zero_()
    fz.load_dense(model, state)
    for key, value in model[1].state_dict().items():
        torch.testing.assert_close(value, expected[key])


def test_a_dense_checkpoint_that_is_not_finite_is_refused_before_anything_is_changed() -> None:
    model = fz.factorize(GPT2.make(), ratio=0.6, attention="heads")
    state = {key: 2 * value for key, value in GPT2.make().state_dict().items()}
    before = deepcopy(model.state_dict())
    state["transformer.h.1.attn.c_attn.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"transformer.h.1.attn: attention weights hold NaN .* nothing was changed"):
        fz.load_dense(model, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("frozen", [("q_proj",), ("v_proj",), ("q_proj", "k_proj", "v_proj")])
def test_a_packed_weight_stays_frozen_only_if_all_that_goes_into_it_is(frozen: tuple[str, ...]) -> None:
    model = fz.factorize_attention(nn.MultiheadAttention(8, 2))
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    dense = fz.compose(model)
    assert dense.in_proj_weight.requires_grad == dense.in_proj_bias.requires_grad == (len(frozen) < 3)
    assert dense.out_proj.weight.requires_grad


def test_a_checkpoint_of_a_class_that_is_not_registered_says_to_register_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fz.save(shrunk(OWN), tmp_path)
    plan = fz.plan(OWN.make(), rank_scale=0.5, attention="heads")
    monkeypatch.delitem(_registered, OwnAttention)
    message = r"attention of class OwnAttention, .*; call fz\.register_attention\(OwnAttention, \.\.\.\) first"
    fresh = OWN.make()
    with unchanged(fresh), pytest.raises(ValueError, match=message):
        fz.load(tmp_path, fresh)
    with unchanged(fresh), pytest.raises(ValueError, match=message):
        fz.factorize(fresh, plan)
