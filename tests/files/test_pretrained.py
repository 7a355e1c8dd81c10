from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import factorized as fz
from factorized.testing import error
from tests.attention.attention_zoo import BERT, GPT2, LLAMA, MARIAN, Kind, Torch, tokens


@pytest.mark.parametrize("kind", [BERT, MARIAN, GPT2, LLAMA], ids=lambda kind: kind.name)
@torch.no_grad()
def test_save_pretrained_and_from_pretrained_apply_the_plan_again(kind: Kind, tmp_path: Path) -> None:
    model = fz.factorize(kind.make(), ratio=0.7, attention="heads", keep_first_and_last=False)
    if kind is not BERT:
        model.generation_config.max_new_tokens = 7
    fz.save_pretrained(model, tmp_path)
    loaded = fz.from_pretrained(type(model), tmp_path, dtype=torch.float64)
    assert not loaded.training
    assert type(loaded) is type(model)
    assert torch.equal(kind.run(loaded), kind.run(model))
    if kind is not BERT:
        assert loaded.generation_config.max_new_tokens == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_from_pretrained_gives_the_type_that_was_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = fz.factorize_attention(built, forms=("ov",))
    fz.save_pretrained(model, tmp_path)
    for cls in (type(model), AutoModelForCausalLM):
        loaded = fz.from_pretrained(cls, tmp_path)
        assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
        buffers = dict(model.named_buffers())  # rotary frequencies: float32, whatever the weights are
        assert all(buffer.dtype == buffers[name].dtype for name, buffer in loaded.named_buffers())
    other = fz.from_pretrained(type(model), tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in other.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


def test_parameters_of_mixed_types_come_back_in_the_widest(tmp_path: Path) -> None:
    model = fz.factorize_attention(BERT.make(torch.bfloat16))
    model.embeddings.LayerNorm.float()
    fz.save_pretrained(model, tmp_path)
    loaded = fz.from_pretrained(type(model), tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert model.config.architectures is None  # the model's own config is left as it is


def test_the_config_says_what_transformers_would_have_written(tmp_path: Path) -> None:
    fz.save_pretrained(fz.factorize_attention(BERT.make(torch.float16)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float16", ["BertModel"])


def test_from_pretrained_takes_auto_classes_too(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = fz.factorize_attention(LLAMA.make(torch.float32), forms=("ov",))
    fz.save_pretrained(model, tmp_path)
    loaded = fz.from_pretrained(AutoModelForCausalLM, tmp_path)
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def test_from_pretrained_puts_the_model_on_a_device(tmp_path: Path) -> None:
    model = fz.factorize_attention(LLAMA.make(torch.float32), forms=("ov",))
    fz.save_pretrained(model, tmp_path)
    elsewhere = fz.from_pretrained(type(model), tmp_path, device="meta")
    assert {parameter.device.type for parameter in elsewhere.parameters()} == {"meta"}


def test_embeddings_that_resizing_made_one_module_come_back(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config)
    assert model.encoder.embed_tokens is not model.shared
    model.resize_token_embeddings(56)
    assert model.encoder.embed_tokens is model.shared
    fz.factorize(model, rank=4, keep_first_and_last=False)
    fz.save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    fz.save_plan(model, tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        loaded = fz.from_pretrained(T5ForConditionalGeneration, tmp_path / folder)
        assert loaded.encoder.embed_tokens is loaded.decoder.embed_tokens is loaded.shared
        assert loaded.lm_head.U is loaded.shared.U
        state = loaded.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_composed_models_are_what_transformers_saves_and_loads_by_itself(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    model = fz.factorize(GPT2.make(torch.float32), ratio=0.6, attention="heads", keep_first_and_last=False)
    fz.compose(model).save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert error(loaded(tokens()).logits, model(tokens()).logits) < 1e-4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: fz.save_pretrained(fz.factorize_attention(Torch()), path), "Torch has no transformers config"),
        (lambda path: fz.from_pretrained(nn.Linear, path), "must be a model class .*Linear.*; the folder comes after"),
        (lambda path: fz.from_pretrained(path, BERT.make()), "must be a model class .*; the folder comes after it"),
        (lambda path: fz.from_pretrained(type(BERT.make()), path / "none"), "must hold config.json and plan.json"),
    ],
)
def test_wrong_input_to_the_wrappers_is_refused(call: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def test_a_folder_that_transformers_wrote_alone_says_how_to_add_the_plan(tmp_path: Path) -> None:
    model = fz.factorize_attention(BERT.make())
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds no plan.json. .*fz.save_plan\(.*opened by Bert\w+.from_pretrained"):
        fz.from_pretrained(type(model), tmp_path)
    fz.save_plan(model, tmp_path)
    assert not fz.from_pretrained(type(model), tmp_path).training


def test_weights_of_another_plan_are_refused(tmp_path: Path) -> None:
    model, other = (fz.factorize(BERT.make(torch.float32), rank=rank, keep_first_and_last=False) for rank in (4, 2))
    model.save_pretrained(tmp_path)
    fz.save_plan(other, tmp_path)
    with pytest.raises(ValueError, match=r"the weights in .* do not fit its plan\.json: mismatched keys: .*Save"):
        fz.from_pretrained(type(model), tmp_path)
    fz.save_plan(fz.factorize(BERT.make(torch.float32), rank=4, include=["encoder"]), tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its plan\.json: missing keys: "):
        fz.from_pretrained(type(model), tmp_path)


def test_a_config_with_code_of_its_own_is_refused_for_auto_classes(tmp_path: Path) -> None:
    from transformers import AutoModel, BertModel

    fz.save_pretrained(fz.factorize_attention(BERT.make()), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    (tmp_path / "mine.py").write_text("raise SystemExit('this code was run')")
    for model_type in ("bert", "mine"):
        mine = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
        path.write_text(json.dumps({**config, "model_type": model_type, "auto_map": mine}))
        message = (
            r"config\.json names code in its folder \(auto_map\), which is never run; import .* instead of AutoModel"
        )
        with pytest.raises(ValueError, match=message) as caught:
            fz.from_pretrained(AutoModel, tmp_path)
        assert "trust_remote_code" not in str(caught.value)
    path.write_text(json.dumps({**config, "auto_map": mine}))
    assert isinstance(fz.from_pretrained(BertModel, tmp_path), BertModel)


def test_code_of_the_folder_is_refused_to_transformers_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModel

    fz.save_pretrained(fz.factorize_attention(BERT.make(torch.float32)), tmp_path)
    asked = []
    for cls, name in ((AutoConfig, "from_pretrained"), (AutoModel, "from_config")):
        original = getattr(cls, name)

        def watched(*args: Any, original: Any = original, **options: Any) -> Any:
            asked.append(options.get("trust_remote_code"))
            return original(*args, **options)

        monkeypatch.setattr(cls, name, watched)
    fz.from_pretrained(AutoModel, tmp_path)
    assert asked == [False, False]


def test_what_is_no_model_class_of_transformers_or_no_type_is_refused(tmp_path: Path) -> None:
    from transformers import BertModel

    model = fz.factorize_attention(BERT.make())
    fz.save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="cls must be a model class of transformers"):
        fz.from_pretrained(Torch, tmp_path)
    with pytest.raises(ValueError, match="got a model: pass BertModel itself"):
        fz.from_pretrained(model, tmp_path)
    for dtype in ("float16", torch.int8):
        with pytest.raises(ValueError, match="dtype must be a floating-point"):
            fz.from_pretrained(BertModel, tmp_path, dtype=dtype)  # type: ignore[arg-type]
