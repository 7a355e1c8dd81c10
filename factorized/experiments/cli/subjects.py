"""The model to compress: a run of ``factorized train``, a Hugging Face folder, or a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.cli.console import progress_bar
from factorized.experiments.cli.images import load_data_of_run
from factorized.experiments.cli.text import is_text_run, load_text
from factorized.experiments.models.hugging_face import model_folder
from factorized.experiments.training.result import RESULT
from factorized.experiments.training.trained import FOLDER, checksum_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from factorized.experiments.compress.subject import Subject

CONFIG = "config.json"
LENGTH = 128  # tokens of a sequence that a model of others is calibrated and judged with


def open_subject(model: str, data: str | None, device: torch.device, *, trust_model: bool = False) -> Subject:
    """Return the trained model of that name with its data."""
    path = model_folder(model)
    if (path / RESULT).is_file():
        return _text_run(path, data, device) if is_text_run(path) else _image_run(path, data, device, trust_model)
    if (path / CONFIG).is_file():
        return _hugging_face(path, data, device)
    if ":" in model and not model.startswith("hf:"):
        return _classifier(model, model, [], data, device)
    marks = (RESULT, CONFIG)
    within = sorted(found.parent for mark in marks for found in path.glob(f"**/{mark}"))[:1] if path.is_dir() else []
    around = [parent for parent in path.parents for mark in marks if (parent / mark).is_file()] if path.exists() else []
    hint = f"; did you mean {[*within, *around][0]}?" if within or around else ""
    raise ValueError(
        f"MODEL must be the folder of a finished run (with {RESULT}) or of a Hugging Face model (with {CONFIG}), or "
        f"module:function, got {model}{hint or _other_hint(path)}"
    )


def _other_hint(path: Path) -> str:
    """Return how to compress what the path may mean: a file of weights alone, or a model of the Hub."""
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".safetensors"):
        return "; write a function that builds the network and loads this file, and name it as module:function"
    if not path.exists() and len(path.parts) <= 2 and not path.is_absolute():
        return f"; download a model of the Hugging Face Hub first: hf download {path} --local-dir FOLDER"
    return ""


def default_folder(model: str, ratio: float) -> Path:
    """Return the default folder of a model's compression."""
    path = model_folder(model)
    if (path / RESULT).is_file():
        return path / f"compressed-{ratio:g}"
    return Path("out") / "compressed" / f"{_called(path).replace(':', '-')}-{ratio:g}"


def _called(folder: Path) -> str:
    """Return the name of a folder, those of ``.`` and ``..`` too."""
    return folder.resolve().name if folder.name in ("", "..") else folder.name


def _image_run(run: Path, data: str | None, device: torch.device, trust_model: bool) -> Subject:
    from factorized.experiments.compress.images import ImageSubject
    from factorized.experiments.training.trained import load_trained

    recipe, result, _ = load_trained(run, trust_model=trust_model)
    images = load_data_of_run(recipe, result, data)

    def make() -> nn.Module:
        return load_trained(run, trust_model=trust_model)[2]

    identity = [*result["files"].values(), images.checksum]
    name, seed = f"{recipe.name} seed {result['seed']}", result["seed"]
    return ImageSubject(name, identity, device, make, recipe, seed, model=recipe.model.name, images=images)


def _text_run(run: Path, data: str | None, device: torch.device) -> Subject:
    from factorized.experiments.compress.text import TextSubject
    from factorized.experiments.text.tokenizer import load_tokenizer
    from factorized.experiments.text.trained import load_text_run

    recipe, result, _, _ = load_text_run(run)
    corpus = load_text(recipe, data, tokenizer=load_tokenizer(run / FOLDER))

    def make() -> nn.Module:
        return load_text_run(run)[2]

    identity = [*result["files"].values(), corpus.checksum]
    name, seed = f"{recipe.name} seed {result['seed']}", result["seed"]
    return TextSubject(name, identity, device, make, recipe, seed, reads=recipe, corpus=corpus)


def _hugging_face(folder: Path, data: str | None, device: torch.device) -> Subject:
    """Return a model of transformers: of the task that its config names."""
    from factorized.experiments.compress.text import TextSubject
    from factorized.experiments.models.hugging_face import drawn_keys, need_transformers, refuse_factorized, refuse_lost
    from factorized.experiments.recipes.text import TextData, TextModel, TextRecipe
    from factorized.experiments.text.models import check_vocabulary, load_folder, most_tokens, text_outline
    from factorized.experiments.text.tokenizer import load_tokenizer
    from factorized.files.pretrained import refuse_own_code

    refuse_own_code(folder, "write a function that builds the model, and name it as module:function")
    refuse_factorized(folder)
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    task = _task(need_transformers(), folder, config)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    if not any(path.suffix == ".safetensors" for path in files):
        raise ValueError(
            f"{folder} holds no .safetensors file; save the model there with model.save_pretrained(folder)"
        )
    identity, name = [checksum_of(path) for path in files], _called(folder)
    if task == "images":
        return _classifier(f"hf:{folder}", name, identity, data, device)
    if data is None:
        raise ValueError(f"{folder} is a language model; name its text by --data: a folder of .txt files")
    tokenizer = load_tokenizer(folder)
    outline = text_outline(task, folder)
    check_vocabulary(outline, tokenizer)
    text = TextData(name="own", train=["."], length=min(LENGTH, most_tokens(outline) or LENGTH))
    recipe = TextRecipe(name=name, task=task, model=TextModel(name=f"hf:{folder}"), data=text)
    corpus = load_text(recipe, data, tokenizer=tokenizer)

    def make() -> nn.Module:
        model, report = load_folder(task, folder)
        refuse_lost(folder, drawn_keys(report))
        found: nn.Module = model
        return found

    return TextSubject(name, [*identity, corpus.checksum], device, make, reads=recipe, corpus=corpus)


def _task(transformers: Any, folder: Path, config: dict[str, Any]) -> Any:
    """Return what the class in a config is for: a task of text, or images."""
    named = transformers.models.auto.modeling_auto
    kinds = {
        "language": named.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": named.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "images": named.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    classes = config.get("architectures") or []
    if not config.get("causal", True):  # XLM has one class for both kinds of text
        del kinds["language"]
    for task, names in kinds.items():
        held = {name for value in names.values() for name in (value if isinstance(value, (tuple, list)) else (value,))}
        if held.intersection(classes):
            return task
    raise ValueError(
        f"{folder / CONFIG}: architectures must name a model for causal or masked language modeling or for image "
        f"classification, got {classes}; load another in Python, and use fz.Calibrated"
    )


def _classifier(model: str, name: str, identity: list[str], data: str | None, device: torch.device) -> Subject:
    """Return a classifier that a function or a Hugging Face folder gives, with the images of ``data``."""
    import torch

    from factorized.experiments.compress.images import ImageSubject
    from factorized.experiments.data.load import load_images
    from factorized.experiments.models.build import build_for
    from factorized.experiments.models.hugging_face import as_trained_on
    from factorized.experiments.training.network import check_classifier
    from factorized.files.checksum import checksum_of_tensors
    from factorized.surgery.state import distinct_tensors, plain_state

    if data is None:
        raise ValueError(f"{model} classifies images; name them by --data: a file, a folder, or a set such as digits")
    with progress_bar() as bar:
        images = load_images(data, None, bar)
    if model.startswith("hf:"):
        images = as_trained_on(model_folder(model), images)

    def make() -> nn.Module:
        torch.manual_seed(0)  # a function that draws its weights draws the same ones again
        return build_for(model, images)

    network = make()
    check_classifier(model, network, images)
    weights, tied = distinct_tensors(plain_state(network))
    identity = [*identity, checksum_of_tensors(weights, tied), images.checksum]
    return ImageSubject(name, identity, device, make, model=model, images=images)
