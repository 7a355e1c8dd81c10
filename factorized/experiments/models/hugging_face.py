"""Hugging Face image classifiers from a local folder, as plain modules that return logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from factorized.experiments.data.extras import need
from factorized.experiments.data.images import Images
from factorized.files.folder import MANIFEST
from factorized.files.pretrained import from_pretrained, refuse_own_code, save_pretrained
from factorized.surgery.compose import is_factorized

SAFE = ("model.safetensors", "model.safetensors.index.json")
PROCESSOR = "preprocessor_config.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class ImageClassifier(nn.Module):
    """A Hugging Face image classifier that takes a tensor and returns a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        x: Tensor,  # (batch, channels, height, width)
    ) -> Tensor:  # (batch, classes)
        """Classify a batch of images."""
        return self.model(pixel_values=x).logits


def hugging_face_model(folder: Path, classes: int, image_size: int, channels: int) -> ImageClassifier:
    """Return the classifier that ``folder``/config.json describes, with the weights beside it where there are any.

    Where the weights are for another number of classes, the last layer is initialized at random. Nothing is downloaded,
    and no code of the folder is run.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model hf:{folder}: {folder / 'config.json'} is missing; save a model there with "
            "model.save_pretrained(folder)"
        )
    refuse_own_code(folder, "write a function that builds the model, and name it as module:function")
    refuse_factorized(folder)
    transformers = need_transformers()
    kind = transformers.AutoModelForImageClassification
    with reading(folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _check(folder, config.to_dict(), image_size, channels)
        if config.num_labels != classes:
            config.num_labels = classes
        if any((folder / name).is_file() for name in (*SAFE, *PICKLED)):
            model, report = _load(kind, folder, config)
            _check_filled(folder, model, report, classes)
        else:
            model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return ImageClassifier(model.train())


def model_folder(name: str) -> Path:
    """Return the folder of a model that is named as ``hf:FOLDER``."""
    return Path(name.removeprefix("hf:")).expanduser()


def write_classifier(network: ImageClassifier, folder: Path, source: Path) -> None:
    """Write a folder that transformers opens, by ``fz.from_pretrained`` if it is factorized.

    Its image processor is that of ``source``, where there is one.
    """
    write_model(network.model, folder)
    if (source / PROCESSOR).is_file():
        shutil.copyfile(source / PROCESSOR, folder / PROCESSOR)


def read_classifier(folder: Path) -> ImageClassifier:
    """Return the factorized classifier that ``write_classifier`` wrote."""
    with quiet():
        return ImageClassifier(from_pretrained(need_transformers().AutoModelForImageClassification, folder))


def write_model(model: Any, folder: Path) -> None:
    """Write a model of transformers, dense or factorized, to a folder, replacing what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    with quiet():
        if is_factorized(model):
            save_pretrained(model, folder)
        else:
            model.save_pretrained(folder)


def as_trained_on(folder: Path, images: Images) -> Images:
    """Return images as the trained classifier in ``folder`` takes them: normalized as its image processor does.

    Raise if they have another number of classes. Where nothing says how to normalize them, they stay as they are.
    """
    with reading(folder):
        config = need_transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if config.num_labels != len(images.classes):
        raise ValueError(
            f"model hf:{folder} was trained for {config.num_labels} classes, and {images.name} has "
            f"{len(images.classes)}; give images of all its classes, in its order"
        )
    path = folder / PROCESSOR
    try:
        says = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        normalized = _normalized(images, says)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not say how to normalize {images.name}: {error}") from None
    if says.get("do_flip_channel_order"):  # MobileViT
        raise ValueError(
            f"{path}: the network takes the channels of images in the opposite order; write a function that returns it "
            "and lets it flip them, and name that as module:function"
        )
    return normalized


def _normalized(images: Images, says: dict[str, Any]) -> Images:
    """Return images with the mean and deviation that an image processor has, on the scale of 0 to 1."""
    normalizes = says.get("do_normalize", True)
    mean, std = (says.get("image_mean"), says.get("image_std")) if normalizes else (0.0, 1.0)
    if mean is None or std is None:
        return images
    scale = 255 * says.get("rescale_factor", 1 / 255) if says.get("do_rescale", True) else 255.0
    means, stds = (v if isinstance(v, list) else [v] * images.channels for v in (mean, std))
    if says.get("rescale_offset"):  # EfficientNet can subtract one before that, and divide by the deviation once more
        means = [m + 1 for m in means]
    if says.get("include_top"):
        stds = [s * s for s in stds]
    return replace(images, mean=tuple(m / scale for m in means), std=tuple(s / scale for s in stds))


def _load(kind: Any, folder: Path, config: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with the weights of ``folder``, and what transformers reports about them."""
    pickled = [name for name in PICKLED if (folder / name).is_file()]
    try:
        with quiet():
            model, report = kind.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,  # as images are, and because half precision would round small updates away
                ignore_mismatched_sizes=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except Exception as error:
        if not pickled or any((folder / name).is_file() for name in SAFE):
            raise
        # torch would tell the user to read it with weights_only=False, which runs whatever code is in it
        raise ValueError(
            f"model hf:{folder}: {pickled[0]} is damaged, or a pickle of more than tensors, which is never run; save "
            "the model again as safetensors, with model.save_pretrained(folder)"
        ) from error
    return model, report


def _check(folder: Path, config: dict[str, Any], image_size: int, channels: int) -> None:
    for key, got in (("image_size", image_size), ("num_channels", channels)):
        expected = config.get(key)
        sizes = {expected} if isinstance(expected, int) else set(expected or ())
        if sizes and sizes != {got}:
            raise ValueError(
                f"model hf:{folder}: its config.json says {key}={expected}, the data have {got}; take data that fit, "
                f"or a folder whose config.json says {key}={got}"
            )


def _check_filled(folder: Path, model: nn.Module, report: dict[str, Any], classes: int) -> None:
    """Raise where more than the last layer, whose size is the number of classes, was left without its weights."""
    state = model.state_dict()
    refuse_lost(folder, [key for key in drawn_keys(report) if len(state[key]) != classes])


def drawn_keys(report: dict[str, Any]) -> list[str]:
    """Return the parameters that transformers initialized, by its report, because the file has none that fit."""
    return sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})


def refuse_lost(folder: Path, lost: list[str]) -> None:
    """Raise if there are parameters for which ``folder`` has no weights."""
    if lost:
        raise ValueError(
            f"model hf:{folder}: its weights have no fitting {', '.join(lost[:3])} ({len(lost)} in all); they are of "
            "another model than config.json says"
        )


def refuse_factorized(folder: Path) -> None:
    """Raise if ``folder`` holds a factorized model: transformers would draw the weights of its factorized layers."""
    if (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} holds a factorized model ({MANIFEST}), and a dense one is needed; write one with "
            f"fz.compose(fz.from_pretrained(CLASS, {str(folder)!r})).save_pretrained(FOLDER)"
        )


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Explain what transformers and safetensors raise for a folder that is damaged or not whole."""
    try:
        yield
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"model hf:{folder} cannot be read: {error}; save it again with model.save_pretrained(folder)"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and reports."""
    logging = need_transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def need_transformers() -> Any:
    """Return transformers, or say which extra brings it."""
    return need("transformers", "transformers", "a Hugging Face model", "text")
