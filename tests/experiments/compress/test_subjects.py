"""What is compressed: the batches of images and of text, and what tells one network from another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import factorized as fz
from factorized.experiments.cli.subjects import open_subject
from factorized.experiments.compress.images import ImageSubject
from factorized.experiments.compress.text import TextSubject
from factorized.experiments.data.augment import normalize
from factorized.experiments.data.load import load_images
from factorized.experiments.models.build import build_model
from factorized.experiments.recipes.text import TextModel
from factorized.experiments.text.network import build_text_network
from factorized.experiments.training.train import train
from tests.experiments.text.small import small
from tests.experiments.training.small import digits, recipe

CPU = torch.device("cpu")


def test_batches_of_images_are_normalized_and_of_all_classes_though_the_set_is_sorted() -> None:
    images = digits()
    order = images.y_train.argsort()
    images = replace(images, x_train=images.x_train[order], y_train=images.y_train[order])
    subject = ImageSubject("own", [], CPU, lambda: build_model("resnet8", 10, 8, 1), model="resnet8", images=images)
    batches = subject.batches(200)
    assert [len(y) for _, y in batches] == [128, 72]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert set(y.tolist()) == set(range(10))
    every = normalize(images.x_train, images.mean, images.std)
    for one, label in zip(x[:20], y[:20], strict=True):
        (place,) = (every == one).flatten(1).all(1).nonzero().flatten().tolist()[:1]
        assert images.y_train[place] == label
    again = subject.batches(200)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches, again, strict=True))
    assert sum(len(y) for _, y in subject.batches(10**6)) == len(images.y_train)


@pytest.mark.parametrize("task", ["language", "masked"])
def test_batches_of_text_are_spread_over_it_and_always_the_same(task: str, tmp_path: Path) -> None:
    made, corpus = small(task, tmp_path)
    subject = TextSubject(
        "own", [], CPU, lambda: build_text_network(made, corpus.tokenizer, 0), reads=made, corpus=corpus
    )
    examples = subject.task.examples
    count = len(examples) // 3
    random = torch.get_rng_state()
    batches = subject.batches(count)
    assert torch.equal(torch.get_rng_state(), random)
    labels = torch.cat([batch[1] for batch in batches])
    assert len(labels) == count
    torch.manual_seed(7)
    again = torch.cat([batch[1] for batch in subject.batches(count)])
    assert torch.equal(labels, again)  # masked alike too, whatever was drawn before
    if task == "language":
        chosen = torch.cat([batch[0] if torch.is_tensor(batch[0]) else batch[0]["input_ids"] for batch in batches])
        expected = [torch.as_tensor(examples[3 * n]["input_ids"]) for n in range(count)]
        assert torch.equal(chosen, torch.stack(expected))


def test_other_weights_and_other_data_are_another_network(tmp_path: Path) -> None:
    for seed in (0, 1):
        changed = recipe("schedule.epochs=1", "run.batch=1024", name="digits/resnet8")
        train(changed, load_images("digits"), tmp_path, seeds=(seed,), device="cpu")
    first, second = (open_subject(str(tmp_path / f"seed-{seed}"), None, CPU) for seed in (0, 1))
    result = json.loads((tmp_path / "seed-0/result.json").read_text())
    assert set(result["files"].values()) < set(first.identity)
    assert first.identity[-1] == second.identity[-1]  # the data
    assert first.identity[0] != second.identity[0]
    assert (first.seed, second.seed) == (0, 1)


def test_a_function_that_draws_its_weights_draws_the_same_ones_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("draws_its_weights.py").write_text(
        "from factorized.experiments.models.resnet import resnet\n"
        "def made(classes):\n"
        "    return resnet(8, classes, 1)\n"
    )
    first, second = (open_subject("draws_its_weights:made", "digits", CPU) for _ in range(2))
    assert first.identity == second.identity
    torch.testing.assert_close(first.dense().state_dict(), first.dense().state_dict())


def test_code_in_a_hugging_face_folder_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Own"], "auto_map": {"AutoModel": "own.Own"}}))
    with pytest.raises(ValueError, match=r"names code in its folder .* write a function that builds the model"):
        open_subject(str(tmp_path), None, CPU)


def test_a_folder_without_all_dense_weights_is_refused_and_not_filled_by_chance(tmp_path: Path) -> None:
    made, corpus = small("language", tmp_path)
    model = fz.factorize(build_text_network(made, corpus.tokenizer, 0), rank=2)
    folder = tmp_path / "network"
    model.save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"have no fitting model\.layers\.0\..* they are of another model"):
        open_subject(str(folder), str(tmp_path), CPU).dense()
    fz.save_plan(model, folder)
    with pytest.raises(ValueError, match=r"holds a factorized model \(plan\.json\), .*write one with fz\.compose\("):
        open_subject(str(folder), str(tmp_path), CPU)
    named = made.model_copy(update={"model": TextModel(name=f"hf:{folder}")})
    with pytest.raises(ValueError, match="holds a factorized model"):
        build_text_network(named, corpus.tokenizer, 0)


def classifier(folder: Path, classes: int = 10) -> Path:
    """Write a tiny Hugging Face classifier of gray images and return its folder."""
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(num_channels=1, num_labels=classes, **sizes)
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("says", "of_pixels"),
    [
        ({"image_mean": [0.5], "image_std": [0.25], "rescale_factor": 1 / 255}, lambda x: (x / 255 - 0.5) / 0.25),
        ({"image_mean": 0.5, "image_std": 0.25, "rescale_factor": 1 / 127.5}, lambda x: (x / 127.5 - 0.5) / 0.25),
        ({"image_mean": [120], "image_std": [60], "do_rescale": False}, lambda x: (x - 120) / 60),
        ({"image_mean": [0.5], "image_std": [0.25], "do_normalize": False}, lambda x: x / 255),
    ],
)
def test_a_hugging_face_classifier_is_fed_as_its_image_processor_does(
    tmp_path: Path, says: dict[str, Any], of_pixels: Callable[[Tensor], Tensor]
) -> None:
    folder = classifier(tmp_path / "resnet")
    (folder / "preprocessor_config.json").write_text(json.dumps(says))
    x, y = open_subject(str(folder), "digits", CPU).batches(8)[0]
    rows = torch.randperm(len(load_images("digits").y_train), generator=torch.Generator().manual_seed(0))[:8]
    torch.testing.assert_close(x, of_pixels(load_images("digits").x_train[rows].float()))
    torch.testing.assert_close(y, load_images("digits").y_train[rows])


def test_a_hugging_face_classifier_of_other_classes_is_refused_and_its_last_layer_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="was trained for 12 classes, and digits has 10; give images of all"):
        open_subject(str(classifier(tmp_path / "resnet", 12)), "digits", CPU)


def test_an_image_processor_that_does_not_fit_the_images_is_named(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "resnet")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not say how to normalize digits: .*one value"):
        open_subject(str(folder), "digits", CPU)
