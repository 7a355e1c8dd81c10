"""Hugging Face image classifiers from a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import factorized as fz
from factorized.experiments.models.build import build_model
from factorized.experiments.models.hugging_face import ImageClassifier


@pytest.fixture
def resnet_folder(tmp_path: Path) -> Path:
    """A tiny Hugging Face ResNet's config.json, for 5 classes."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5
    )
    config.save_pretrained(tmp_path / "resnet")
    return tmp_path / "resnet"


@pytest.fixture
def vit_folder(tmp_path: Path) -> Path:
    """A tiny vision transformer with weights, for 16×16 images in colour and 4 classes."""
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=4,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_hugging_face_config_gives_a_fresh_model_that_returns_logits(resnet_folder: Path) -> None:
    x = torch.randn(2, 3, 32, 32)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(build_model(f"hf:{resnet_folder}", 7))
    first, second = (model.eval()(x) for model in models)
    assert isinstance(models[0], ImageClassifier)
    assert first.shape == (2, 7)
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_another_type_is_trained_in_that_of_images(resnet_folder: Path, dtype: torch.dtype) -> None:
    config = transformers.ResNetConfig.from_pretrained(resnet_folder)
    for model in (config, transformers.ResNetForImageClassification(config).to(dtype)):  # without weights, and with
        config.dtype = dtype
        model.save_pretrained(resnet_folder)
        built = build_model(f"hf:{resnet_folder}", 5)
        assert {parameter.dtype for parameter in built.parameters()} == {torch.float32}
        assert built(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_hugging_face_weights_are_loaded(vit_folder: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(vit_folder).eval()
    model = build_model(f"hf:{vit_folder}", 4, image_size=16)
    assert model.training
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.eval()(x), saved(pixel_values=x).logits)


def test_for_another_number_of_classes_only_the_last_layer_is_drawn_again(vit_folder: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(vit_folder).state_dict()
    model = build_model(f"hf:{vit_folder}", 9, image_size=16).model
    assert model.classifier.out_features == 9
    for key, value in model.state_dict().items():
        assert key.startswith("classifier") or torch.equal(value, saved[key]), key


def test_a_hugging_face_model_is_factorized_trained_and_composed(vit_folder: Path) -> None:
    model = fz.factorize(build_model(f"hf:{vit_folder}", 4, image_size=16), ratio=0.7, attention="heads")
    x = torch.randn(2, 3, 16, 16)
    model(x).sum().backward()
    torch.testing.assert_close(fz.compose(model.eval())(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_hugging_face_model_compiles_without_a_break(resnet_folder: Path) -> None:
    model = build_model(f"hf:{resnet_folder}", 7).eval()
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("arguments", "message"), [((4, 32), "image_size=16.*32"), ((4, 16, 1), "num_channels=3.*1")])
def test_a_hugging_face_model_of_another_size_says_so(
    vit_folder: Path, arguments: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(f"hf:{vit_folder}", *arguments)


def test_a_folder_without_config_says_which_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json is missing"):
        build_model(f"hf:{tmp_path}", 10)


def test_damaged_hugging_face_weights_name_the_folder(vit_folder: Path) -> None:
    (vit_folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match=f"hf:{vit_folder} cannot be read"):
        build_model(f"hf:{vit_folder}", 4, image_size=16)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickled(folder: Path) -> Path:
    """Turn the weights of a folder into a pickle."""
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()
    return folder / "pytorch_model.bin"


def test_pickled_tensors_are_loaded(vit_folder: Path) -> None:
    expected = build_model(f"hf:{vit_folder}", 4, image_size=16).model.state_dict()
    pickled(vit_folder)
    found = build_model(f"hf:{vit_folder}", 4, image_size=16).model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("damage", ["bomb", "cut", "garbage"])
def test_a_pickle_of_more_than_tensors_is_refused_without_advice_to_run_it(vit_folder: Path, damage: str) -> None:
    path, trace = pickled(vit_folder), vit_folder / "ran"
    if damage == "bomb":
        torch.save({"a": Bomb(trace)}, path)
    else:
        path.write_bytes(path.read_bytes()[:1000] if damage == "cut" else b"garbage")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged, or a pickle of more than") as caught:
        build_model(f"hf:{vit_folder}", 4, image_size=16)
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def test_a_config_with_code_of_its_own_is_refused(vit_folder: Path) -> None:
    path = vit_folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}))
    (vit_folder / "mine.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ValueError, match="names code in its folder \\(auto_map\\), which is never run") as caught:
        build_model(f"hf:{vit_folder}", 4, image_size=16)
    assert "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_a_config_that_is_not_json_is_called_damaged(vit_folder: Path, text: str) -> None:
    (vit_folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        build_model(f"hf:{vit_folder}", 4, image_size=16)


def test_weights_of_another_model_are_refused(vit_folder: Path) -> None:
    config = json.loads((vit_folder / "config.json").read_text())
    (vit_folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="they are of another model"):
        build_model(f"hf:{vit_folder}", 4, image_size=16)


def test_a_factorized_model_in_the_folder_is_refused(vit_folder: Path) -> None:
    (vit_folder / "plan.json").write_text("{}")
    with pytest.raises(ValueError, match=r"holds a factorized model \(plan\.json\), and a dense one is needed"):
        build_model(f"hf:{vit_folder}", 4, image_size=16)


def test_without_transformers_the_error_says_what_to_install(
    resnet_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[text\]'"):
        build_model(f"hf:{resnet_folder}", 10)


def test_loading_weights_prints_nothing_even_where_the_last_layer_is_drawn_again(
    vit_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    capfd.readouterr()
    build_model(f"hf:{vit_folder}", 7, image_size=16)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (logging.WARNING, True)
    logging.set_verbosity(before[0])
    (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()
