"""What is particular to transformers: torch's fast path, shared biases, generation."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.nn.linear import FactorizedLinear
from tests.models.zoo import BERT, ENCODER, LLAMA, LLAMA_TIED, Species, logits

FORMS: list[Callable[[nn.Module], nn.Module]] = [deepcopy, fz.compose, fz.lower]
NESTED = "ignore:The PyTorch API of nested tensors is in prototype stage"


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def encoder_without_fast_path(model: nn.Module, *inputs: Tensor) -> Tensor:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("include", [["*linear1", "*linear2"], ["*linear1"], ["*linear2"], ["*layers.1.linear?"]])
@pytest.mark.parametrize("grad", [False, True], ids=["fast path", "slow path"])
def test_the_encoder_in_eval_mode_computes_the_same_on_and_off_the_fast_path(
    form: Callable[[nn.Module], nn.Module], include: list[str], grad: bool
) -> None:
    model = fz.factorize(ENCODER.trained(), rank=8, include=include).eval()
    tokens = ENCODER.inputs()
    with torch.no_grad():
        expected = encoder_without_fast_path(model, tokens)
    with torch.set_grad_enabled(grad):
        assert close(form(model)(tokens), expected)


# The fast path would multiply the factors out in every call: low-rank layers are called instead.
@pytest.mark.parametrize(("form", "times"), [(deepcopy, 0), (fz.compose, 2), (fz.lower, 0)])
def test_only_the_composed_encoder_takes_the_fast_path(
    form: Callable[[nn.Module], nn.Module], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = form(fz.factorize(ENCODER.trained(), rank=8, include=["*linear?"])).eval()
    fused = torch._transformer_encoder_layer_fwd
    calls = []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(args) or fused(*args))
    with torch.no_grad():
        model(ENCODER.inputs())
    assert len(calls) == times


@pytest.mark.filterwarnings(NESTED)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("include", [["*linear?"], ["*layers.1.linear?"]])
def test_the_encoder_in_eval_mode_understands_padding(
    form: Callable[[nn.Module], nn.Module], include: list[str]
) -> None:
    model = fz.factorize(ENCODER.trained(), rank=8, include=include).eval()
    tokens = ENCODER.inputs()
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[::2, 5:] = True
    with torch.no_grad():
        expected = encoder_without_fast_path(model, tokens, padding)
        assert close(form(model)(tokens, padding), expected)
        assert not close(model(tokens), expected)


def test_torch_attention_is_left_alone_and_says_why() -> None:
    plan = fz.plan(ENCODER.fresh(), rank=4, keep_first_and_last=False)
    reasons = {entry.name: entry.reason for entry in plan.skipped}
    assert set(reasons) == {"encoder.layers.0.self_attn", "encoder.layers.1.self_attn"}
    assert all("its projections are parameters, not layers" in reason for reason in reasons.values() if reason)


@pytest.mark.parametrize("form", [deepcopy, fz.compose, fz.lower])
def test_the_bias_of_berts_decoder_stays_tied(form: Callable[[nn.Module], nn.Module]) -> None:
    model = BERT.fresh()
    shared = model.cls.predictions.bias
    assert model.cls.predictions.decoder.bias is shared
    fz.factorize(model, ratio=0.5, keep_first_and_last=False)
    assert isinstance(model.cls.predictions.decoder, FactorizedLinear)
    assert model.cls.predictions.decoder.bias is shared
    head = form(model).cls.predictions
    decoder = head.decoder[1] if form is fz.lower else head.decoder
    assert decoder.bias is head.bias
    assert decoder.bias is not shared


@pytest.mark.parametrize("species", [LLAMA, LLAMA_TIED], ids=lambda species: species.name)
def test_llama_generates_the_same_factorized_and_composed(species: Species) -> None:
    model = species.trained().eval()
    prompt = species.inputs(batch=2)[:, :4].clamp(min=3)
    fz.factorize(model, ratio=0.6, keep_first_and_last=False)
    settings = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "attention_mask": torch.ones_like(prompt),
    }
    texts = [form(model).generate(prompt, **settings) for form in FORMS]
    assert texts[0].shape == (2, 10)
    assert torch.equal(texts[0][:, :4], prompt)
    assert torch.equal(texts[1], texts[0])
    assert torch.equal(texts[2], texts[0])


def test_the_cache_of_a_factorized_llama_gives_what_the_whole_text_gives() -> None:
    model = fz.factorize(LLAMA.trained(), ratio=0.6).eval()
    tokens = LLAMA.inputs(batch=2)
    with torch.no_grad():
        start = model(tokens[:, :5], use_cache=True)
        rest = model(tokens[:, 5:], past_key_values=start.past_key_values)
        assert close(torch.cat([start.logits, rest.logits], 1), logits(model, tokens))


def test_a_model_whose_code_scales_weights_in_place_says_so_and_runs_without_those_layers() -> None:
    from transformers import RwkvConfig, RwkvForCausalLM

    def rwkv() -> nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 40, "context_length": 16, "hidden_size": 16, "num_hidden_layers": 2}
        return RwkvForCausalLM(RwkvConfig(**sizes, rescale_every=1)).eval()

    tokens, scheme = torch.arange(12).unsqueeze(0), fz.Overcomplete("full")
    model = fz.factorize(rwkv(), scheme, init="spectral")
    with pytest.raises(RuntimeError, match="own code writes to it, keep the layer dense: exclude="):
        model(tokens)
    model = fz.factorize(rwkv(), scheme, init="spectral", exclude=["*attention.output", "*feed_forward.value"])
    assert close(model(tokens).logits, rwkv()(tokens).logits)
