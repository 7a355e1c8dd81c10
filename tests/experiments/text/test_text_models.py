"""The networks of text are those of the recipe, and their optimizers act as it says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import factorized as fz
from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import TextRecipe
from factorized.experiments.text.models import build_text_model, text_config
from factorized.experiments.text.network import build_text_network, build_text_optimizer
from factorized.experiments.text.tokenizer import StandIn

TOKENIZER = StandIn(50)
SIZES = ("model.hidden=16", "model.layers=3", "model.heads=4", "model.feed_forward=24", "model.dropout=0.3")
SMALL = ("model.hidden=16", "model.layers=1", "model.heads=2", "model.feed_forward=24")


def recipe_of(name: str, *changes: str) -> TextRecipe:
    recipe = load_any_recipe(name, changes)
    assert isinstance(recipe, TextRecipe)
    return recipe


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "language/tiny",
            ("model.kv_heads=2", "data.length=32"),
            {
                "model_type": "llama",
                "hidden_size": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 24,
                "attention_dropout": 0.3,
                "max_position_embeddings": 32,
                "tie_word_embeddings": True,
            },
        ),
        ("language/tiny", ("model.tied=false",), {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        (
            "bert/tiny",
            ("model.positions=77", "data.length=32"),
            {
                "model_type": "bert",
                "hidden_size": 16,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 24,
                "hidden_dropout_prob": 0.3,
                "attention_probs_dropout_prob": 0.3,
                "max_position_embeddings": 77,
            },
        ),
        ("bert/tiny", ("data.length=32",), {"max_position_embeddings": 32}),
        (
            "translation/iwslt14",
            ("run.longest=300",),
            {
                "model_type": "marian",
                "d_model": 16,
                "encoder_layers": 3,
                "decoder_layers": 3,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 24,
                "decoder_ffn_dim": 24,
                "dropout": 0.3,
                "activation_function": "relu",
                "scale_embedding": True,  # as the paper's Transformer, which multiplies them by the root of the width
                "init_std": 0.25,
                "max_position_embeddings": 301,  # the first token of a translation is read, and not counted
                "forced_eos_token_id": None,  # a translation that is cut has no end
                "decoder_start_token_id": TOKENIZER.pad_token_id,
            },
        ),
    ],
)
def test_the_architecture_has_the_sizes_of_the_recipe(
    name: str, changes: tuple[str, ...], expected: dict[str, Any]
) -> None:
    config = text_config(recipe_of(name, *SIZES, *changes), TOKENIZER)
    assert {field: getattr(config, field) for field in expected} == expected
    assert config.vocab_size == len(TOKENIZER)


def _ov(model: nn.Module) -> fz.Form:
    return next(form for form in fz.forms(model) if form.kind == "ov")


@pytest.mark.parametrize("name", ["bert/tiny-flambe", "bert/tiny-lamb-fd"])
def test_spectral_initialization_balances_ov_alone_and_keeps_the_function(name: str) -> None:
    plain = build_text_model(recipe_of("bert/tiny", *SMALL), TOKENIZER, 0).eval()
    model = build_text_network(recipe_of(name, *SMALL), TOKENIZER, 0).eval()
    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    for before, after in zip(fz.forms(plain), fz.forms(model), strict=True):
        left, right = after.values
        balanced = torch.allclose(left.mT @ left, right.mT @ right, atol=1e-6)
        assert balanced == (after.kind == "ov"), after.name
        same = all(map(torch.equal, before.values, after.values))
        assert same == (after.kind == "qk"), after.name


@pytest.mark.parametrize(("name", "is_spectral"), [("-lowrank-0.5-si", True), ("-lowrank-0.5", False)])
def test_a_recipe_without_spectral_initialization_draws_the_factors(name: str, is_spectral: bool) -> None:
    changes = ("model.hidden=32", "model.layers=1", "model.feed_forward=48")
    dense = build_text_model(recipe_of("language/tiny", *changes), TOKENIZER, 0)
    model = build_text_network(recipe_of(f"language/tiny{name}", *changes), TOKENIZER, 0)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, fz.FactorizedLinear)
    weight = dense.get_submodule("model.layers.0.mlp.up_proj").weight
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    best = (left * values)[:, : layer.rank] @ right[: layer.rank]
    assert torch.allclose(layer.weight, best, atol=1e-5) == is_spectral


@pytest.mark.parametrize("name", ["translation/iwslt14-0.5", "translation/tatoeba-0.25"])
def test_without_spectral_initialization_a_translators_products_are_no_larger_than_its_dense_matrices(
    name: str,
) -> None:
    changes = ("model.hidden=64", "model.feed_forward=96")
    dense = build_text_model(recipe_of(name, *changes), TOKENIZER, 0)
    model = build_text_network(recipe_of(name, *changes), TOKENIZER, 0)
    deviation = dense.get_input_embeddings().weight.std()
    found = [m for m in model.modules() if isinstance(m, fz.FactorizedEmbedding | fz.FactorizedLinear)]
    assert {type(m) for m in found} == {fz.FactorizedEmbedding, fz.FactorizedLinear}
    for layer in found:
        for factor in layer.factors:
            assert factor.std().item() == pytest.approx(deviation.item(), rel=0.1)
        assert layer.weight.std() < 1.1 * deviation
    for form in fz.forms(model):
        if form.kind in ("ov", "qk"):  # heads that were cut are drawn alike
            assert form.values[0].std().item() == pytest.approx(deviation.item(), rel=0.1)


@pytest.mark.parametrize(
    ("optimizer", "moment", "joins_the_gradient"),
    [
        ("sgd", "momentum_buffer", True),
        ("lamb", "exp_avg", True),
        ("flambe", "exp_avg", False),
        ("adamw", "exp_avg", False),
    ],
)
def test_frobenius_decay_joins_the_gradient_of_sgd_and_lamb_and_is_apart_from_it_elsewhere(
    optimizer: str, moment: str, joins_the_gradient: bool
) -> None:
    decay = ("decay.kind=frobenius", "decay.strength=0.5", 'decay.forms=["ov"]')
    recipe = recipe_of("bert/tiny", *SMALL, f"optimizer.name={optimizer}", *decay)
    model = build_text_network(recipe, TOKENIZER, 0)
    made = build_text_optimizer(recipe, model)
    value = _ov(model).factors[0].parameter
    before = value.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    assert bool(made.state[value][moment].any()) == joins_the_gradient
    assert not torch.equal(value, before)


@pytest.mark.parametrize("optimizer", ["lamb", "flambe", "adamw", "sgd"])
def test_an_optimizer_takes_its_settings_from_the_recipe_and_leaves_clipping_to_the_trainer(optimizer: str) -> None:
    settings = ("optimizer.lr=0.25", "optimizer.betas=[0.7,0.8]", "optimizer.momentum=0.6", "optimizer.nesterov=true")
    decay = ("decay.kind=frobenius", "decay.strength=0.5", "decay.rest=0.125")
    recipe = recipe_of("bert/tiny", *SMALL, f"optimizer.name={optimizer}", *settings, *decay)
    model = build_text_network(recipe, TOKENIZER, 0)
    made: Any = build_text_optimizer(recipe, model)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    factors = {factor.parameter for form in fz.forms(model) if form.kind == "ov" for factor in form.factors}
    for group in made.param_groups:
        assert group["lr"] == 0.25
        if optimizer == "sgd":
            assert (group["momentum"], group["nesterov"]) == (0.6, True)
        else:
            assert tuple(group["betas"]) == (0.7, 0.8)
        for parameter in group["params"]:
            name = name_of[parameter]
            free = name.endswith("bias") or "LayerNorm" in name or parameter in factors
            assert group["weight_decay"] == (0.0 if free else 0.125), name
    assert getattr(made, "max_grad_norm", None) is None


def test_ordinary_decay_is_of_matrices_alone_factors_among_them() -> None:
    recipe = recipe_of("bert/tiny", *SMALL, "decay.kind=weight", "decay.strength=0.5")
    model = build_text_network(recipe, TOKENIZER, 0)
    decays = {
        p: group["weight_decay"] for group in build_text_optimizer(recipe, model).param_groups for p in group["params"]
    }
    for name, parameter in model.named_parameters():
        assert decays[parameter] == (0.0 if name.endswith("bias") or "LayerNorm" in name else 0.5), name


@pytest.mark.parametrize("forms", ['["layers"]', '["ov"]', '["ov","qk"]', '["layers","ov","qk"]'])
def test_the_forms_that_a_recipe_names_are_decayed_and_no_others(forms: str) -> None:
    factorize = ("factorize.scheme=low_rank", "factorize.rank_scale=0.5", "factorize.attention=heads")
    decay = ("decay.kind=frobenius", "decay.strength=0.5", "decay.rest=0.0", f"decay.forms={forms}")
    recipe = recipe_of("translation/numbers", *SMALL, *factorize, *decay, "factorize.keep_first_and_last=false")
    model = build_text_network(recipe, TOKENIZER, 0)
    optimizer = build_text_optimizer(recipe, model)
    before = {form.name: math.sqrt(form.norm_squared(form.values).sum().item()) for form in fz.forms(model)}
    assert {form.kind for form in fz.forms(model)} == {"linear", "embedding", "ov", "qk"}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for form in fz.forms(model):
        named = form.kind if form.kind in ("ov", "qk") else "layers"
        shrinks = math.sqrt(form.norm_squared(form.values).sum().item()) < before[form.name] * (1 - 1e-6)
        assert shrinks == (f'"{named}"' in forms), form.name


def folder_of(tmp_path: Path, **changes: Any) -> str:
    """Write a tiny RoBERTa in half precision and return its name in a recipe."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.RobertaConfig(vocab_size=50, max_position_embeddings=40, **sizes)
    transformers.RobertaForMaskedLM(config).bfloat16().save_pretrained(tmp_path)
    written = tmp_path / "config.json"
    written.write_text(json.dumps({**json.loads(written.read_text()), **changes}))
    return f"model.name=hf:{tmp_path}"


def test_a_folder_in_half_precision_is_trained_in_float32_so_that_no_update_is_rounded_away(tmp_path: Path) -> None:
    recipe = recipe_of("bert/tiny", folder_of(tmp_path), "data.length=38")
    model = build_text_network(recipe, TOKENIZER, 0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    written = load_file(tmp_path / "model.safetensors")["roberta.encoder.layer.1.output.dense.weight"]
    assert torch.equal(model.get_parameter("roberta.encoder.layer.1.output.dense.weight"), written.float())


def test_a_folder_gets_no_longer_sequences_than_it_takes(tmp_path: Path) -> None:
    recipe = recipe_of("bert/tiny", folder_of(tmp_path), "data.length=39")
    with pytest.raises(ValueError, match=r"data.length = 39 is more than the 38 tokens that hf:.* takes; ask for 38"):
        build_text_network(recipe, TOKENIZER, 0)


def test_a_folder_without_the_weights_of_its_layers_is_refused_but_a_head_is_drawn(tmp_path: Path) -> None:
    named = folder_of(tmp_path)
    questions = recipe_of("squad/bert-small", "data.length=32", "data.stride=8")
    own = questions.model_copy(update={"model": recipe_of("bert/tiny", named).model})
    model = build_text_model(own, TOKENIZER, 0)
    assert model.get_submodule("qa_outputs").out_features == 2
    folder_of(tmp_path, vocab_size=60)  # of the head and of the embeddings, the weights have another size
    with pytest.raises(ValueError, match=r"no fitting lm_head\.bias.* of another model than config"):
        build_text_network(recipe_of("bert/tiny", named, "data.length=32"), TOKENIZER, 0)
    folder_of(tmp_path, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"no fitting roberta\.encoder\.layer\.2\..* of another model than config"):
        build_text_network(recipe_of("bert/tiny", named, "data.length=32"), TOKENIZER, 0)
