"""``factorized compress`` of classifiers that users bring: functions of their own, and folders of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import factorized as fz
from tests.experiments.cli.conftest import Cli
from tests.experiments.cli.test_compress_verb import QUICK, state_of


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("resnet(8, classes, 3)", "cannot classify images (1, 8, 8): it failed"),
        ("resnet(8, 7, 1)", "must return a tensor (images, 10), got (2, 7) for two images"),
    ],
)
def test_a_function_whose_model_does_not_fit_the_images_says_so(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"does_not_fit_{abs(hash(body))}"
    source = f"from factorized.experiments.models.resnet import resnet\ndef trained(classes):\n    return {body}\n"
    Path(f"{name}.py").write_text(source)
    assert message in cli("compress", f"{name}:trained", "--ratio", "0.5", "--data", "digits").error


def test_a_function_is_found_in_a_module_and_not_in_a_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models_in_a_file.py").touch()
    message = cli("compress", "models_in_a_file.py:trained", "--ratio", "0.5", "--data", "digits").error
    assert "a function is named as module:function, such as mymodels:small" in message


def test_a_frozen_classifier_is_compressed_and_not_recovered(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("frozen_classifier.py").write_text(
        "from factorized.experiments.models.resnet import resnet\n"
        "def trained(classes):\n    return resnet(8, classes, 1).requires_grad_(False)\n"
    )
    asked = ("compress", "frozen_classifier:trained", "--ratio", "0.5", "--data", "digits", "--out", "small", *QUICK)
    said = cli(*asked)
    assert said.code == 0, said.err
    state = state_of(Path("small"))
    assert state["compressed"]["parameters"] <= 0.5 * state["before"]["parameters"]
    assert "has no parameters that can be trained" in cli(*asked, "--recover", "digits/resnet8").error


def test_an_image_classifier_of_hugging_face_is_compressed(cli: Cli, tmp_path: Path, npz: Path) -> None:
    import transformers

    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=10
    )
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "resnet")
    (tmp_path / "resnet" / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.25]}')
    given = ("--ratio", "0.7", "--data", npz, "--out", tmp_path / "out", *QUICK)
    refused = cli("compress", tmp_path / "resnet", *given, "--to", "lowered").error
    assert "cannot be written as lowered: transformers would not open it" in refused
    said = cli("compress", tmp_path / "resnet", *given, "--to", "composed")
    assert said.code == 0, said.err
    state = state_of(tmp_path / "out")
    assert state["compressed"]["parameters"] <= 0.7 * state["before"]["parameters"]
    kind = transformers.AutoModelForImageClassification
    x = torch.randn(2, 1, 8, 8)
    small = fz.from_pretrained(kind, tmp_path / "out" / "compressed").eval()
    plain = kind.from_pretrained(tmp_path / "out" / "composed").eval()
    torch.testing.assert_close(small(x).logits, plain(x).logits)
    assert (tmp_path / "out" / "composed" / "preprocessor_config.json").is_file()
    assert "classifies images; name them by --data" in cli("compress", tmp_path / "resnet", "--ratio", "0.7").error
