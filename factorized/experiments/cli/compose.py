"""``factorized compose``: export a trained run as a plain PyTorch, ONNX or torch.export file, and check it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from factorized.experiments.cli.arguments import Data, Device, Run, TrustModel, examples
from factorized.experiments.cli.console import say
from factorized.experiments.cli.evaluate import ALLOWED as ALLOWED_TO_RECORDED
from factorized.experiments.cli.text import compose_run, is_text_run
from factorized.experiments.data.explain import writing_to
from factorized.experiments.data.extras import install_command

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from factorized.experiments.data.images import Images
    from factorized.experiments.recipes.recipe import Recipe

EXAMPLES = examples(
    "factorized compose out/digits/resnet8-wide-fd/seed-0 --to plain",
    "factorized compose out/cifar10/resnet32x2-lowrank-0.1-si-fd/seed-0 --to onnx --lower --data DIR",
    "factorized compose out/digits/resnet8-lowrank-0.1-si-fd/seed-0 --to export --out small.pt2",
)
Kind = Literal["plain", "onnx", "export"]  # what a network can be written as
ALLOWED = 0.05  # points of accuracy: rounding may move an image or two of ten thousand across a border


def compose(
    run: Run,
    to: Annotated[Kind, typer.Option(help="A plain safetensors checkpoint, an ONNX or a torch.export file.")] = "plain",
    out: Annotated[
        Path | None, typer.Option(help="The file to write; by default RUN/composed.*, or RUN/lowered.* with --lower.")
    ] = None,
    lower: Annotated[
        bool, typer.Option("--lower", help="Keep the network low-rank: two plain layers for each product.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    data: Data = None,
    device: Device = None,
    trust_model: TrustModel = False,
) -> None:
    """Export a trained run as one file without factors, and compare its accuracy before and after.

    The file is read back and run on the test images. If the accuracies differ by more than 0.05 points, the file is
    removed and the exit code is 1. On the images of the run, the accuracy before is also compared with the recorded
    one.
    """
    from factorized.experiments.cli.device import pick_device
    from factorized.experiments.cli.images import load_data_of_run
    from factorized.experiments.training.export import (
        COMPOSED,
        LOWERED,
        SUFFIXES,
        describe_network,
        logits_on_test,
        plain_network,
    )
    from factorized.experiments.training.trained import load_trained
    from factorized.nn.running import count_parameters

    where = pick_device(device)
    if is_text_run(run):
        if lower or to != "plain":
            raise ValueError(f"{run} is a run on text: it is composed into a transformers folder, by --to plain only")
        compose_run(run, out, data, where, overwrite=overwrite)
        return
    recipe, result, network = load_trained(run, trust_model=trust_model)
    suffix = SUFFIXES[to]
    path = out or run / f"{LOWERED if lower else COMPOSED}{suffix}"
    _check_path(path, suffix, overwrite)
    images = load_data_of_run(recipe, result, data)
    trained, before = count_parameters(network), logits_on_test(network.to(where), images, where)
    _check_recorded(run, recipe, result, images, network, before)
    plain = plain_network(network.cpu(), low_rank=lower)
    about = describe_network(recipe, images)
    if not _write_checked(plain, to, path, images, about, before, where):
        raise typer.Exit(1)
    size = path.stat().st_size / 2**20
    mean, std = (" ".join(f"{value:.6g}" for value in values) for values in (images.mean, images.std))
    say(str(path))
    say(f"{size:.2f} MiB, {trained:,} parameters in training, {count_parameters(plain):,} now")
    say(f"input: pixels in 0..1, minus mean {mean}, over std {std}")


def _check_recorded(
    run: Path,
    recipe: Recipe,
    result: dict[str, Any],
    images: Images,
    network: nn.Module,
    logits: Tensor,  # (n, classes), in float32
) -> None:
    """Raise if the network's accuracy is not the one that the run recorded."""
    from factorized.experiments.training.evaluate import evaluate_as_trained
    from factorized.experiments.training.export import accuracy_of

    if not logits.isfinite().all():
        raise ValueError(f"{run}: the network's outputs on {images.name} hold NaN or infinity; nothing was written")
    if images.checksum != result["data"]["checksum"]:
        say(f"recorded {result['accuracy']:.2f} % on other images ({result['data']['name']}): not compared")
        return
    found = accuracy_of(logits, images)
    if abs(found - result["accuracy"]) > ALLOWED_TO_RECORDED:  # which may be one of few images, in bfloat16
        _, found = evaluate_as_trained(recipe, network, images)
    if abs(found - result["accuracy"]) > ALLOWED_TO_RECORDED:
        raise ValueError(
            f"{run} recorded {result['accuracy']:.2f} % on these images, and its network has {found:.2f} % now, more "
            f"than {ALLOWED_TO_RECORDED} points apart; nothing was written. Train the run again"
        )


def _check_path(path: Path, suffix: str, overwrite: bool) -> None:
    from factorized.experiments.training.export import SUFFIXES

    if path.suffix != suffix:
        other = next((f"; for {path.suffix}, give --to {to}" for to, end in SUFFIXES.items() if end == path.suffix), "")
        raise ValueError(f"--out {path}: the name of such a file must end in {suffix}{other}")
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; name a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is already there; name another file by --out, or replace it with --overwrite")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to")


def _write_checked(
    plain: nn.Module,
    to: Kind,
    path: Path,
    images: Images,
    about: dict[str, str],
    before: Tensor,  # (n, classes)
    device: torch.device,
) -> bool:
    """Write the file, read it back, and keep it if it is as accurate as ``before``; say which, and return it."""
    from factorized.experiments.training.export import accuracy_of, logits_on_test, read_network, write_network

    temporary = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    expected = accuracy_of(before, images)
    try:
        with writing_to(path, "name another file by --out"):
            write_network(plain, to, temporary, images, about)
        function = read_network(to, temporary, plain, device)
        if function is None:
            say(f"accuracy before {expected:.2f} %; the file was written and not run: {install_command('onnx')}")
        else:
            after = logits_on_test(function, images, device)
            accuracy, error = accuracy_of(after, images), (after - before).abs().max().item()
            say(f"accuracy before {expected:.2f} %, after {accuracy:.2f} %; logits differ by {error:.1e} at most")
            if not abs(accuracy - expected) <= ALLOWED:
                say(f"that is more than {ALLOWED} points apart: {path} was not written")
                return False
        temporary.replace(path)
        return True
    finally:
        with suppress(OSError):
            temporary.unlink()
