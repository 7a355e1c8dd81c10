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
from torch import Tensor, nn

import factorized as fz
from factorized.experiments.cli.subjects import default_folder, open_subject
from factorized.experiments.compress.images import ImageSubject
from factorized.experiments.compress.text import TextSubject
from factorized.experiments.data.augment import normalize
from factorized.experiments.data.images import Images
from factorized.experiments.data.load import load_images
from factorized.experiments.models.build import build_model
from factorized.experiments.models.hugging_face import as_trained_on
from factorized.experiments.recipes.text import TextModel
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.train import train_text
from factorized.experiments.training.progress import Reporter
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


@pytest.mark.parametrize(("extent", "sizes"), [(64, [128, 2]), (224, [10] * 13)])
def test_large_images_come_in_smaller_batches(extent: int, sizes: list[int]) -> None:
    x = torch.zeros(130, 1, extent, extent, dtype=torch.uint8)
    images = replace(digits(), x_train=x, y_train=torch.arange(130) % 10, x_test=x[:10], y_test=torch.arange(10))
    subject = ImageSubject("own", [], CPU, nn.Identity, model="resnet8", images=images)
    assert [len(y) for _, y in subject.batches(2048)] == sizes


@pytest.mark.parametrize(("task", "share"), [("language", 1 / 3), ("language", 2 / 3), ("masked", 1 / 3)])
def test_batches_of_text_are_spread_over_it_and_always_the_same(task: str, share: float, tmp_path: Path) -> None:
    made, corpus = small(task, tmp_path)
    subject = TextSubject(
        "own", [], CPU, lambda: build_text_network(made, corpus.tokenizer, 0), reads=made, corpus=corpus
    )
    examples = subject.task.examples
    count = round(share * len(examples))
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
        expected = [torch.as_tensor(examples[n * len(examples) // count]["input_ids"]) for n in range(count)]
        assert torch.equal(chosen, torch.stack(expected))


def test_a_text_recovery_is_trained_with_the_seed_of_its_run(tmp_path: Path) -> None:
    made, corpus = small("language", tmp_path)
    train_text(made, corpus, tmp_path / "run", seeds=(3,), device="cpu")
    subject = open_subject(str(tmp_path / "run/seed-3"), str(tmp_path), CPU)
    assert subject.seed == 3
    network = fz.factorize(subject.dense(), ratio=0.9)
    out = tmp_path / "out"
    result = subject.train(subject.fit(made), network, None, out, Reporter(quiet=True))
    assert result["seed"] == 3
    (kept, *rest) = [path.name for path in out.iterdir()]
    assert (kept, rest) == ("seed-3", [])
    torch.testing.assert_close(subject.trained(out).state_dict(), network.state_dict())


@pytest.mark.parametrize("task", ["language", "masked"])
def test_other_text_is_another_network(tmp_path: Path, task: str) -> None:
    made, corpus = small(task, tmp_path)
    train_text(made, corpus, tmp_path / "run", device="cpu")
    folder = language_model(tmp_path / "network", "LlamaForCausalLM", "language", **BERT)
    for model in (tmp_path / "run/seed-0", folder):
        first, again = (open_subject(str(model), str(tmp_path), CPU).identity for _ in range(2))
        text = tmp_path / "train.txt"
        before = text.read_text()
        text.write_text(before.replace("seven", "eight"))
        other = open_subject(str(model), str(tmp_path), CPU).identity
        text.write_text(before)
        assert first == again
        assert first != other
        assert list(first)[:-1] == list(other)[:-1]  # the weights are the same


def test_sentences_of_like_length_are_calibrated_with_together_so_that_little_of_them_is_padding(
    tmp_path: Path,
) -> None:
    lengths = torch.randint(1, 20, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "train.tsv").write_text("".join(f"{'one ' * length}\t{'two ' * length}\n" for length in lengths))
    made, corpus = small("translation", tmp_path)
    subject = TextSubject(
        "own", [], CPU, lambda: build_text_network(made, corpus.tokenizer, 0), reads=made, corpus=corpus
    )
    batches = subject.batches(1000)
    sources, targets = torch.cat([batch[0]["attention_mask"].sum(1) for batch in batches]), corpus.texts["train"][1]
    assert sources.tolist() == sorted(corpus.texts["train"][0].lengths.tolist())
    assert sum((batch[1] != -100).sum().item() for batch in batches) == len(targets.tokens)
    padded = sum((batch[0]["attention_mask"] == 0).sum().item() for batch in batches)
    assert padded < 0.05 * sources.sum()  # of sentences in the order of the file, it is 70 %


@pytest.mark.parametrize("task", ["translation", "language"])
def test_tokens_of_short_sequences_weigh_as_much_on_the_loss_as_those_of_long_ones(task: str, tmp_path: Path) -> None:
    made, corpus = small(task, tmp_path)
    subject = TextSubject("own", [], CPU, nn.Identity, reads=made, corpus=corpus)
    gradients = []
    for length in (3, 40):
        logits = torch.zeros(4, length, 10, requires_grad=True)
        loss = subject.loss({"logits": logits}, torch.ones(4, length, dtype=torch.long))
        loss.backward()
        gradients.append(logits.grad)
    short, long = gradients
    torch.testing.assert_close(short[:, 0], long[:, 0])  # type: ignore[index]


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


def language_model(folder: Path, kind: str, task: str, **sizes: Any) -> str:
    """Write a tiny Hugging Face model with a tokenizer and return its folder; its text is beside it."""
    _, corpus = small(task, folder.parent)
    model_class = getattr(transformers, kind)
    model_class(model_class.config_class(vocab_size=len(corpus.tokenizer), **sizes)).save_pretrained(folder)
    corpus.tokenizer.save_pretrained(folder)
    return str(folder)


BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("kind", "task", "sizes", "length"),
    [
        ("BertForMaskedLM", "masked", {**BERT, "max_position_embeddings": 24}, 24),
        ("RobertaForMaskedLM", "masked", {**BERT, "max_position_embeddings": 24, "pad_token_id": 3}, 20),
        ("MPNetForMaskedLM", "masked", {**BERT, "max_position_embeddings": 24}, 22),
        ("GPT2LMHeadModel", "language", {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}, 24),
        ("MptForCausalLM", "language", {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 24}, 24),
    ],
)
def test_a_hugging_face_model_is_given_sequences_of_at_most_its_positions(
    tmp_path: Path, kind: str, task: str, sizes: dict[str, Any], length: int
) -> None:
    subject = open_subject(language_model(tmp_path / "network", kind, task, **sizes), str(tmp_path), CPU)
    (inputs, labels), *_ = subject.batches(4)
    assert inputs["input_ids"].shape[1] == labels.shape[1] == length
    assert subject.evaluate(subject.dense())[subject.score] > 0


def test_a_hugging_face_model_in_half_precision_keeps_it_and_recovers_in_float32(tmp_path: Path) -> None:
    folder = language_model(tmp_path / "network", "BertForMaskedLM", "masked", **BERT)
    transformers.BertForMaskedLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    subject = open_subject(folder, str(tmp_path), CPU)
    network = fz.factorize(subject.dense(), rank=2)
    subject.save(network, tmp_path / "small")
    network = subject.load(tmp_path / "small")
    assert network.dtype == torch.bfloat16
    before = [parameter.clone() for parameter in network.parameters()]
    made = small("masked", tmp_path, "optimizer.lr=1e-6")[0]  # less than half a step of bfloat16
    subject.train(subject.fit(made), network, None, tmp_path / "out", Reporter(quiet=True))
    after = list(subject.trained(tmp_path / "out").parameters())
    assert {parameter.dtype for parameter in after} == {torch.float32}
    assert all((a.float() != b).any() for a, b in zip(before, after, strict=True) if a.dim() > 1)


def test_a_hugging_face_model_with_fewer_embeddings_than_tokens_is_refused(tmp_path: Path) -> None:
    folder = language_model(tmp_path / "network", "BertForMaskedLM", "masked", **BERT)
    transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, **BERT)).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"the model has 50 embeddings and the tokenizer \d+ tokens; take the"):
        open_subject(folder, str(tmp_path), CPU)


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


OFFSET = {"rescale_offset": True, "rescale_factor": 1 / 127.5}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("ViT", {}),
        ("ViT", {"do_rescale": False}),
        ("CLIP", {"rescale_factor": 1 / 127.5}),
        ("EfficientNet", {}),
        ("EfficientNet", {"include_top": False}),
        ("EfficientNet", OFFSET),
        ("Levit", {"do_normalize": False}),
    ],
)
def test_images_are_normalized_as_the_image_processors_of_transformers_do(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(**changes)
    processor.save_pretrained(tmp_path)
    transformers.ViTConfig(num_labels=2).save_pretrained(tmp_path)
    x = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 0, 1])
    images = as_trained_on(tmp_path, Images("own", x, y, x, y, ("a", "b"), (0.1,) * 3, (0.2,) * 3))
    wanted = processor(list(x.numpy()), do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(normalize(x, images.mean, images.std), wanted, check_dtype=False)


def test_an_image_processor_that_flips_channels_is_refused(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "resnet")
    transformers.MobileViTImageProcessorPil(image_mean=[0.5], image_std=[0.5]).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"preprocessor_config.json: the network takes the channels .* opposite order"):
        open_subject(str(folder), "digits", CPU)


def test_an_image_processor_that_does_not_fit_the_images_is_named(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "resnet")
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    with pytest.raises(ValueError, match=r"preprocessor_config.json does not say how to normalize digits: .*one value"):
        open_subject(str(folder), "digits", CPU)


def test_a_folder_with_another_config_or_tokenizer_is_another_network(tmp_path: Path) -> None:
    folder = language_model(tmp_path / "network", "BertForMaskedLM", "masked", **BERT)
    first = open_subject(folder, str(tmp_path), CPU).identity
    for name in ("config.json", "tokenizer.json"):
        path = Path(folder) / name
        before = path.read_text()
        path.write_text(
            before.replace("{", '{"own": 1,', 1) if name == "config.json" else before.replace("seven", "neves")
        )
        assert open_subject(folder, str(tmp_path), CPU).identity != first
        path.write_text(before)
    assert open_subject(folder, str(tmp_path), CPU).identity == first


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda text: "[1]", r"config\.json is damaged: it holds no settings, but a list"),
        (
            "config.json",
            lambda text: text.replace('"intermediate_size": 32', '"intermediate_size": 40'),
            "have no fitting",
        ),
        (
            "tokenizer.json",
            lambda text: "{}",
            r"tokenizer\.json cannot be read \(KeyError: .*write it again by tokenizer",
        ),
        ("tokenizer.json", lambda text: text[:100], r"tokenizer\.json cannot be read \("),
    ],
)
def test_a_damaged_file_of_a_hugging_face_folder_is_named(
    tmp_path: Path, name: str, change: Callable[[str], str], message: str
) -> None:
    folder = language_model(tmp_path / "network", "BertForMaskedLM", "masked", **BERT)
    path = Path(folder) / name
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        open_subject(folder, str(tmp_path), CPU).dense()


def test_the_working_folder_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = language_model(tmp_path / "network", "BertForMaskedLM", "masked", **BERT)
    monkeypatch.chdir(folder)
    assert open_subject(".", str(tmp_path), CPU).name == "network"
    assert default_folder(".", 0.5) == Path("out/compressed/network-0.5")
    Path("below").mkdir()
    monkeypatch.chdir("below")
    assert open_subject("..", str(tmp_path), CPU).name == "network"


XLM = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 24, "bos_index": 0, "pad_index": 1}


def test_a_language_model_that_sees_the_tokens_to_predict_is_refused(tmp_path: Path) -> None:
    sizes = {**BERT, "max_position_embeddings": 24}
    for is_decoder in (True, False):
        folder = language_model(tmp_path / "network", "BertLMHeadModel", "language", is_decoder=is_decoder, **sizes)
        subject = open_subject(folder, str(tmp_path), CPU)
        assert subject.score == "perplexity"
        if is_decoder:
            subject.dense()
            continue
        with pytest.raises(ValueError, match=r"sees the tokens that it has to predict; .* set is_decoder to true"):
            subject.dense()


@pytest.mark.parametrize(("causal", "score"), [(True, "perplexity"), (False, "loss")])
def test_the_config_of_xlm_says_what_it_is_for(tmp_path: Path, causal: bool, score: str) -> None:
    folder = language_model(tmp_path / "network", "XLMWithLMHeadModel", "masked", causal=causal, **XLM)
    subject = open_subject(folder, str(tmp_path), CPU)
    assert subject.score == score
    assert subject.evaluate(subject.dense())[score] > 0
