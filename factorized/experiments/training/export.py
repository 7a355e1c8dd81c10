"""Export a trained network as one file, and read the file back as a function of images."""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from factorized.experiments.data.augment import normalize
from factorized.experiments.data.extras import need
from factorized.experiments.data.images import Images
from factorized.experiments.recipes.recipe import Recipe
from factorized.files.checksum import read_tensors, save_tensors
from factorized.surgery.compose import compose, is_factorized
from factorized.surgery.lower import lower
from factorized.surgery.state import plain_state

Kind = Literal["plain", "onnx", "export"]
Function = Callable[[Tensor], Tensor]  # images (n, channels, height, width) -> logits (n, classes)
SUFFIXES: dict[Kind, str] = {"plain": ".safetensors", "onnx": ".onnx", "export": ".pt2"}
COMPOSED, LOWERED = "composed", "lowered"  # what such a file in the folder of its run is called
BATCH = 500


def plain_network(network: nn.Module, *, low_rank: bool) -> nn.Module:
    """Return the network as plain torch modules in evaluation mode: composed, or still low-rank; a dense one as is."""
    if not is_factorized(network):
        return network.eval()
    return (lower(network) if low_rank else compose(network)).eval()


def describe_network(recipe: Recipe, images: Images) -> dict[str, str]:
    """Return the metadata of a file: enough to build the network, to feed it and to read its output."""
    return {
        "model": recipe.model.name,
        "recipe": recipe.name,
        "classes": json.dumps(images.classes),
        "mean": " ".join(map(str, images.mean)),
        "std": " ".join(map(str, images.std)),
    }


def write_network(plain: nn.Module, kind: Kind, path: Path, images: Images, about: Mapping[str, str]) -> None:
    """Write a plain network on the CPU to ``path``; the batch of an ONNX or export file is free."""
    if kind == "plain":
        # Tied weights are written under each of their names: whoever reads the file has a whole state dict.
        save_tensors(path, plain_state(plain), about)
        return
    example = torch.zeros(2, images.channels, *images.size)
    free = ({0: torch.export.Dim("batch", max=65536)},)
    program = torch.export.export(plain, (example,), dynamic_shapes=free)
    if kind == "export":
        buffer = io.BytesIO()  # torch's own writer ends the program when the disk is full
        torch.export.save(program, buffer, extra_files=dict(about))
        path.write_bytes(buffer.getbuffer())
        return
    for package in ("onnx", "onnxscript"):
        need(package, package, "an ONNX file", "onnx")
    with _quiet_exporter():
        written = torch.onnx.export(
            program,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: "batch"},),  # the name that the file has for it
            dynamo=True,
            verbose=False,
        )
        assert written is not None  # it is, without a path to write to
        written.model.metadata_props.update(about)
        written.save(path, external_data=False)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hide the messages of torch's exporter about torchvision, which is not needed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def read_network(kind: Kind, path: Path, like: nn.Module, device: torch.device) -> Function | None:
    """Load ``path`` as a function of images, from the file alone; None for ONNX without onnxruntime.

    A plain checkpoint is weights without code: they are put into a copy of ``like``.
    """
    if kind == "plain":
        network = deepcopy(like)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.fill_(math.nan)  # so that only the file's weights are used
        network.load_state_dict(read_tensors(path, "write it again"))
        return network.to(device)
    if kind == "export":
        with _quiet_exporter():
            return torch.export.load(path).module().to(device)
    try:
        session = need("onnxruntime", "onnxruntime", "reading an ONNX file", "onnx").InferenceSession(str(path))
    except ModuleNotFoundError:
        return None
    return lambda x: torch.from_numpy(session.run(None, {"images": x.cpu().numpy()})[0])


@torch.no_grad()
def logits_on_test(function: Function, images: Images, device: torch.device) -> Tensor:  # (n, classes) on the CPU
    """Return the logits of ``function`` on the test images, in float32."""
    mean, std = (torch.tensor(values, device=device) for values in (images.mean, images.std))
    parts = [
        function(normalize(x.to(device), mean, std, torch.float32).contiguous()) for x in images.x_test.split(BATCH)
    ]
    return torch.cat([part.float().cpu() for part in parts])


def accuracy_of(
    logits: Tensor,  # (n, classes)
    images: Images,
) -> float:
    """Return the accuracy in percent."""
    return 100 * (logits.argmax(1) == images.y_test).double().mean().item()
