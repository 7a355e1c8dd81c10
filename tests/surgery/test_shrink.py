from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.attention.heads import HeadsIn, HeadsOut
from factorized.attention.multihead import ShrunkMultiheadAttention
from factorized.attention.register import find_attention
from factorized.formats.frobenius import compose
from factorized.testing import error
from tests.attention.attention_zoo import BERT, GPT2, LLAMA, MARIAN, OWN, TORCH, Kind, every_kind

pytestmark = pytest.mark.usefixtures("own_attention")


def products(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every attention form by name, biases of queries and keys as a last row and column."""
    found = {}
    for read in find_attention(model):
        unit = read.unit
        assert unit is not None
        for kind in ("qk", "ov"):
            left, right = (p.view(p.weight.detach()) for p in unit.form(kind))
            if kind == "qk":
                rows = [
                    torch.zeros_like(w[:, 0]) if p.bias is None else p.bias_view(p.bias.detach())
                    for p, w in zip(unit.form(kind), (left, right), strict=True)
                ]
                left, right = (torch.cat([w, row[:, None]], 1) for w, row in zip((left, right), rows, strict=True))
            shared = left.shape[0] < right.shape[0]
            n = max(left.shape[0], right.shape[0]) // min(left.shape[0], right.shape[0])
            if shared:
                left = left.repeat_interleave(n, 0)
            else:
                right = right.repeat_interleave(n, 0)
            found[f"{read.name}.{kind}"] = left @ right.mT
    return found


@every_kind
@torch.no_grad()
def test_at_scale_one_the_output_is_unchanged(kind: Kind) -> None:
    model = kind.make()
    expected = kind.run(model)
    assert fz.factorize_attention(model, rank_scale=1, forms=kind.forms) is model
    assert (kind.run(model) - expected).abs().max() < 1e-10
    assert all(read.unit is not None and read.unit.shrunk is not None for read in find_attention(model))


@every_kind
@torch.no_grad()
def test_spectral_initialization_of_what_is_there_changes_nothing_that_is_computed(kind: Kind) -> None:
    model = kind.make()
    before = deepcopy(model)
    assert fz.spectral_init_attention(model, forms=kind.forms) is model
    assert (kind.run(model) - kind.run(before)).abs().max() < 1e-10
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(moved)
    for read in find_attention(model):
        for form in kind.forms:
            grams = augmented_grams(read.unit, form)
            for gram in grams:  # orthogonal, and of equal shares
                assert error(torch.diag_embed(torch.diagonal(gram, dim1=-2, dim2=-1)), gram) < 1e-10
            assert error(grams[0], grams[1]) < 1e-10


def augmented_grams(unit: Any, form: str) -> list[torch.Tensor]:
    """Return the Gram matrices of both factors per K/V head, with input biases as a last row."""
    grams = []
    for projection in unit.form(form):
        W = projection.view(projection.weight)
        if projection is not unit.output and projection.bias is not None:
            W = torch.cat([W, projection.bias_view(projection.bias)[:, None]], 1)
        grams.append((W.mT @ W).unflatten(0, (unit.key.heads, -1)).sum(1))
    return grams


@every_kind
def test_truncation_loses_the_tail_of_the_singular_values_of_every_form(kind: Kind) -> None:
    model = kind.make()
    before = products(model)
    groups = dict.fromkeys(before, kind.groups)
    fz.factorize_attention(model, rank_scale=0.5, forms=kind.forms)
    after = products(model)
    for name, old in before.items():
        new = after[name]
        if name.rpartition(".")[2] not in kind.forms:
            assert error(new, old) < 1e-12
            continue
        # Heads that share a matrix are cut together: side by side they are one product.
        stack = old.unflatten(0, (-1, groups[name])).transpose(1, 2).flatten(2) if groups[name] > 1 else old
        values = torch.linalg.svdvals(stack)
        rank = 4
        assert values[:, rank:].square().sum() > 1e-3
        if name.endswith("ov") and "zero attention" in kind.name:
            continue  # there the value bias is a row of the truncated matrix too
        lost = (new - old).square().sum()
        assert abs(lost - values[:, rank:].square().sum()) < 1e-9 * values.square().sum()


@every_kind
@torch.no_grad()
@pytest.mark.parametrize("scales", [{"qk": 0.75, "ov": 0.25}, {"qk": 0.25, "ov": 0.75}])
def test_the_two_forms_may_get_different_ranks(kind: Kind, scales: dict[str, float]) -> None:
    scales = {form: scale for form, scale in scales.items() if form in kind.forms}
    both = fz.factorize_attention(kind.make(), scales, forms=kind.forms)
    expected = kind.make()
    for form, scale in scales.items():  # one after the other, each padded on its own
        expected = fz.compose(fz.factorize_attention(expected, scale, forms=[form]))
    assert (kind.run(both) - kind.run(expected)).abs().max() < 1e-10
    for read in find_attention(both):
        note = read.unit.shrunk if read.unit is not None else None
        assert note is not None
        assert (note.qk, note.ov) == tuple(round(scales.get(form, 1) * 8) for form in ("qk", "ov"))


def test_equal_ranks_leave_plain_layers_of_the_familys_own_class() -> None:
    for kind in (BERT, MARIAN, GPT2):
        model = fz.factorize_attention(kind.make(), rank_scale=0.5)
        assert not any(isinstance(module, (HeadsIn, HeadsOut)) for module in model.modules())
        for name in kind.attention:
            assert type(model.get_submodule(name)) is type(kind.make().get_submodule(name))


@pytest.mark.parametrize(("scale", "size"), [(0.45, 7), (0.5, 8), (0.54, 9)])
def test_heads_are_rounded_to_the_nearest_size(scale: float, size: int) -> None:
    model = fz.factorize_attention(nn.TransformerEncoderLayer(32, nhead=2, batch_first=True), rank_scale=scale)
    assert model.self_attn.q_proj.out_features == model.self_attn.out_proj.in_features == 2 * size


def test_the_softmax_scale_stays_that_of_the_dense_heads() -> None:
    assert fz.factorize_attention(BERT.make()).encoder.layer[0].attention.self.scaling == 8**-0.5
    assert fz.factorize_attention(TORCH[0].make()).attn.scale == 8**-0.5
    assert fz.factorize_attention(GPT2.make()).transformer.h[1].attn.scaling == 8**-0.5 / 2


def test_value_biases_move_into_the_output_bias() -> None:
    model = BERT.make()
    attention = model.encoder.layer[0].attention
    expected = attention.output.dense.bias + attention.output.dense.weight @ attention.self.value.bias
    fz.factorize_attention(model)
    attention = model.encoder.layer[0].attention
    assert error(attention.output.dense.bias, expected) < 1e-12
    assert attention.self.value.bias.abs().max() == 0


@torch.no_grad()
def test_an_output_bias_stays_where_there_are_no_input_biases(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).double().eval()
        model.self_attn.in_proj_bias = None
        return model

    model, x = make(), torch.randn(2, 5, 16).double()
    nn.init.normal_(model.self_attn.out_proj.bias)
    shrunk = fz.factorize_attention(deepcopy(model), rank_scale=1)
    assert error(shrunk(x), model(x)) < 1e-10
    assert error(fz.compose(shrunk)(x), model(x)) < 1e-10
    assert fz.compose(shrunk).state_dict().keys() == model.state_dict().keys()
    half = fz.factorize_attention(deepcopy(model), rank_scale=0.5)
    fz.save(half, tmp_path)
    assert error(fz.load(tmp_path, make())(x), half(x)) == 0


def test_an_output_layer_without_bias_gets_one_for_the_value_biases() -> None:
    model = fz.factorize_attention(OWN.make())
    assert model[0].proj.bias is not None
    assert model[0].proj.bias.abs().max() > 0.01
    assert fz.factorize_attention(OWN.make(), rank_scale=1)[0].proj.bias is None  # whole values keep their own
    assert fz.factorize_attention(OWN.make(), forms=("qk",))[0].proj.bias is None


def test_half_the_scale_is_half_the_parameters_of_the_projections() -> None:
    dense, small = (nn.Sequential(nn.MultiheadAttention(24, 3, bias=False)) for _ in range(2))
    fz.factorize_attention(small, rank_scale=0.5)
    counts = [sum(p.numel() for p in model.parameters()) for model in (dense, small)]
    assert counts[1] * 2 == counts[0]


def test_a_model_that_is_itself_attention_is_returned() -> None:
    dense = nn.MultiheadAttention(24, 3)
    assert isinstance(fz.factorize_attention(dense), ShrunkMultiheadAttention)


@pytest.mark.parametrize("init", ["default", "kaiming", "normal", nn.init.ones_])
def test_other_inits_draw_new_matrices_of_the_smaller_size(init: Any) -> None:
    for kind in (BERT, GPT2, LLAMA, TORCH[3]):
        model = kind.make()
        old_bias = [read.unit.output.bias for read in find_attention(model) if read.unit is not None]
        torch.manual_seed(3)
        fz.factorize_attention(model, 0.5, init=init, forms=kind.forms)
        assert kind.run(model).isfinite().all()
        for read, bias in zip(find_attention(model), old_bias, strict=True):
            unit = read.unit
            assert unit is not None
            assert unit.value.head_size == 4
            assert error(unit.output.bias, bias) == 0
            assert unit.value.bias.abs().max() == 0
            assert unit.value.view(unit.value.weight).abs().max() > 0
            if callable(init):
                assert error(unit.output.weight, torch.ones_like(unit.output.weight)) == 0


def test_what_is_frozen_stays_frozen_and_the_mode_is_kept() -> None:
    model = BERT.make().train()
    attention = model.encoder.layer[0].attention
    attention.self.value.weight.requires_grad_(False)
    attention.output.dense.bias.requires_grad_(False)
    norm = attention.output.LayerNorm
    fz.factorize_attention(model)
    attention = model.encoder.layer[0].attention
    assert not attention.self.value.weight.requires_grad
    assert not attention.output.dense.bias.requires_grad
    assert attention.self.query.weight.requires_grad
    assert attention.training
    assert attention.output.LayerNorm is norm


@torch.no_grad()
def test_attention_that_was_compiled_in_place_runs_its_new_heads() -> None:
    model, expected = BERT.make(), fz.factorize_attention(BERT.make())
    model.encoder.layer[0].attention.self.compile(backend="eager")
    BERT.run(model)
    fz.factorize_attention(model)
    assert error(BERT.run(model), BERT.run(expected)) < 1e-12


def test_the_same_module_at_two_places_stays_one_module() -> None:
    module = nn.MultiheadAttention(8, 2)
    model = fz.factorize_attention(nn.ModuleList([module, nn.Linear(4, 4), module]))
    assert model[0] is model[2]
    assert isinstance(model[0], ShrunkMultiheadAttention)


def test_shrinking_advances_no_random_state() -> None:
    model = BERT.make()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fz.factorize_attention(model)
    assert torch.equal(torch.rand(1), expected)


def test_it_goes_through_the_meta_device() -> None:
    model = BERT.make().to("meta")
    fz.factorize_attention(model, 0.5)
    assert model.encoder.layer[0].attention.self.query.weight.shape == (12, 24)
    assert model.encoder.layer[0].attention.self.query.weight.is_meta


def test_half_types_shrink_in_float32_and_stay_half() -> None:
    model = fz.factorize_attention(BERT.make(torch.bfloat16))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    qk = next(form for form in fz.forms(model) if form.kind == "qk")
    assert compose(qk.U.float(), qk.V.float()).isfinite().all()
