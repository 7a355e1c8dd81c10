"""The models people use, with attention: factorized by one call, trained, decoding, compiled, exported, and back."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.testing import error
from tests.attention.attention_zoo import BERT, GPT2, HUGGING_FACE, LLAMA, MARIAN, Kind, tokens

FOUR = pytest.mark.parametrize("kind", [BERT, GPT2, LLAMA, MARIAN], ids=lambda kind: kind.name)
DECODERS = pytest.mark.parametrize("kind", [GPT2, LLAMA, MARIAN], ids=lambda kind: kind.name)
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def small(kind: Kind, unequal: bool = False, dtype: torch.dtype = torch.float64) -> nn.Module:
    scales = {"qk": 0.75, "ov": 0.5} if unequal else {"qk": 0.5, "ov": 0.5}
    return fz.factorize_attention(kind.make(dtype), {k: scales[k] for k in kind.forms}, forms=kind.forms)


def generate(model: nn.Module, **settings: Any) -> Tensor:
    return model.generate(tokens(), attention_mask=torch.ones_like(tokens()), **{**SETTINGS, **settings})


@FOUR
@pytest.mark.parametrize("optimizer", ["adamw", "flambe"])
def test_one_call_factorizes_a_model_that_trains_composes_lowers_and_generates(kind: Kind, optimizer: str) -> None:
    model = kind.make().train()
    dense = sum(parameter.numel() for parameter in model.parameters())
    model = fz.factorize(model, ratio=0.5, attention="heads", keep_first_and_last=False)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 0.5 * dense
    groups = fz.parameter_groups(model, weight_decay=1e-2)
    if optimizer == "adamw":
        stepper: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-3)
        fz.FrobeniusDecay(model, 1e-4, decoupled=True).attach(stepper)
    else:
        stepper = fz.Flambe(groups, model, lr=1e-3, frobenius_decay=1e-4)
    before = deepcopy(model.state_dict())
    for _ in range(2):
        stepper.zero_grad()
        loss = kind.run(model).square().mean()
        loss.backward()
        stepper.step()
        assert loss.isfinite()
    factors = {factor.parameter for form in fz.forms(model) for factor in form.factors}
    for name, parameter in model.named_parameters():
        if parameter in factors and parameter.grad is not None:
            assert not torch.equal(parameter, before[name]), name
    model.eval()
    with torch.no_grad():
        expected = kind.run(model)
        for form in (fz.compose, fz.lower):
            assert error(kind.run(form(model)), expected) < 1e-10
        if kind is not BERT:
            texts = [generate(one) for one in (model, fz.compose(model), fz.lower(model))]
            assert torch.equal(texts[0], texts[1])
            assert torch.equal(texts[0], texts[2])


@DECODERS
@pytest.mark.parametrize("unequal", [False, True])
@torch.no_grad()
def test_the_cache_gives_what_the_whole_text_gives(kind: Kind, unequal: bool) -> None:
    model = small(kind, unequal)
    assert torch.equal(generate(model, use_cache=True), generate(model, use_cache=False))
    assert torch.equal(generate(model), generate(fz.compose(model)))


@pytest.mark.parametrize("kind", [GPT2, LLAMA], ids=lambda kind: kind.name)
@torch.no_grad()
def test_beams_padding_and_static_caches_work(kind: Kind) -> None:
    model = small(kind, unequal=True)
    composed = fz.compose(model)
    assert torch.equal(generate(model, num_beams=3), generate(composed, num_beams=3))
    assert torch.equal(generate(model, cache_implementation="static"), generate(model))
    mask = torch.ones_like(tokens())
    mask[0, :3] = 0
    both = [one(tokens(), attention_mask=mask).logits[:, 3:] for one in (model, composed)]
    assert error(*both) < 1e-10
    assert error(both[0], model(tokens()).logits[:, 3:]) > 1e-3


@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_at_scale_one_padding_changes_nothing_at_the_positions_that_are_read(way: str, side: str) -> None:
    model = GPT2.make()
    model.set_attn_implementation(way)
    mask = torch.ones_like(tokens())
    mask[0, :2] = 0
    mask = mask if side == "left" else mask.flip(1)
    expected = model(tokens(), attention_mask=mask).logits[mask.bool()]
    for change in (fz.spectral_init_attention, lambda dense: fz.factorize_attention(dense, 1)):
        assert error(change(deepcopy(model))(tokens(), attention_mask=mask).logits[mask.bool()], expected) < 1e-10


@FOUR
def test_gradient_checkpointing_gives_the_same_gradients(kind: Kind) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = small(kind, unequal=True).train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if checkpointed:
            # the newer name, since transformers 5.23
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        kind.run(model).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert max(error(gradients[1][name], gradient) for name, gradient in gradients[0].items()) < 1e-10


@pytest.mark.parametrize("kind", HUGGING_FACE, ids=lambda kind: kind.name)
@pytest.mark.parametrize("unequal", [False, True])
@torch.no_grad()
def test_every_way_of_attending_computes_the_same(kind: Kind, unequal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(kind, unequal)
    calls: list[int] = []
    original = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    results = {}
    for way in ("sdpa", "eager"):
        model.set_attn_implementation(way)
        calls.clear()
        results[way] = kind.run(model)
        assert bool(calls) == (way == "sdpa")
    assert error(results["eager"], results["sdpa"]) < 1e-6  # transformers takes some softmaxes in float32


@torch.no_grad()
def test_attention_weights_can_still_be_asked_for() -> None:
    model = small(BERT, unequal=True)
    model.set_attn_implementation("eager")
    (weights,) = model(tokens(), output_attentions=True).attentions
    assert weights.shape == (2, 3, 6, 6)
    assert error(weights.sum(-1), torch.ones(2, 3, 6, dtype=torch.float64)) < 1e-6


def test_dropout_still_falls_on_attention_in_training() -> None:
    model = small(BERT).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    quiet = BERT.run(model)
    assert torch.equal(BERT.run(model), quiet)
    model.encoder.layer[0].attention.self.dropout.p = 0.5
    assert not torch.equal(BERT.run(model), quiet)


class Logits(nn.Module):
    """A model as torch.export takes it: tokens in, one tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, use_cache=False)[0]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "unequal"),
    [
        pytest.param(BERT, False, id="bert"),
        pytest.param(GPT2, True, id="gpt2, padded"),
        pytest.param(BERT, True, id="bert, padded", marks=pytest.mark.nightly),
        pytest.param(GPT2, False, id="gpt2", marks=pytest.mark.nightly),
        pytest.param(LLAMA, False, id="llama", marks=pytest.mark.nightly),
        pytest.param(LLAMA, True, id="llama, padded", marks=pytest.mark.nightly),
    ],
)
def test_shrunk_models_compile_whole_and_export(kind: Kind, unequal: bool) -> None:
    torch._dynamo.reset()
    model = small(kind, unequal, torch.float32)
    wrapped = Logits(model).eval()
    x = tokens()
    with torch.no_grad():
        expected = wrapped(x)
        compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
        assert error(compiled(x), expected) < 1e-5
        program = torch.export.export(wrapped, (x,)).module()
        assert error(program(x), expected) < 1e-5


@FOUR
def test_spectral_initialization_before_training_leaves_the_loss_as_it_is(kind: Kind) -> None:
    model = kind.make()
    with torch.no_grad():
        expected = kind.run(model)
        fz.spectral_init_attention(model, forms=kind.forms)
        assert (kind.run(model) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("kind", [GPT2, MARIAN], ids=lambda kind: kind.name)
@pytest.mark.parametrize("form", [fz.compose, fz.lower])
def test_tied_embeddings_and_output_layers_stay_tied_around_attention(
    kind: Kind, form: Callable[[nn.Module], nn.Module]
) -> None:
    model = fz.factorize(kind.make(), ratio=0.6, attention="heads", keep_first_and_last=False)
    embedding = model.get_input_embeddings()
    assert embedding.U is model.lm_head.U
    plain = form(model)
    tables = (plain.get_input_embeddings(), plain.lm_head)
    if form is fz.compose:
        assert tables[0].weight is tables[1].weight
    else:
        assert tables[0][0].weight is tables[1][1].weight
