"""What ``--engine`` and its options mean."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factorized.experiments.cli.console import console
from factorized.experiments.data.explain import in_words

if TYPE_CHECKING:
    from factorized.experiments.reproduce.engine import Engine

PATIENCE = 10.0  # seconds for a cluster to answer
OF_ENGINES = {
    "device": ("local",),
    "workers": ("local",),
    "at_once": ("local",),
    "address": ("ray",),
    "gpus": ("ray", "slurm"),
    "slurm": ("slurm",),
}


@dataclass(frozen=True)
class EngineOptions:
    """An engine by name, and the options that were given for it."""

    engine: str
    device: str | None = None
    workers: int | None = None
    at_once: int | None = None
    address: str | None = None
    gpus: float | None = None
    cpus: float = 1.0
    slurm: Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Raise if an option is given that the engine does not use."""
        for name, engines in OF_ENGINES.items():
            if getattr(self, name) is not None and self.engine not in engines:
                option, meant = name.replace("_", "-"), " or ".join(engines)
                raise ValueError(f"--{option} is for --engine {meant}, and the engine is {self.engine}")


def make_engine(given: EngineOptions, out: Path, *, quiet: bool) -> Engine:
    """Return the engine; Ray and submitit are imported only for theirs."""
    from factorized.experiments.data.extras import need

    if given.engine == "ray":
        need("ray", "ray", "--engine ray", "cluster")
        from factorized.experiments.reproduce.on_ray import RayEngine

        if given.address is not None:
            _check_reachable(given.address)
        return RayEngine(address=given.address, gpus=given.gpus, cpus=given.cpus)
    if given.engine == "slurm":
        need("submitit", "submitit", "--engine slurm", "cluster")
        from factorized.experiments.reproduce.on_slurm import SlurmEngine

        gpus = 1 if given.gpus is None else given.gpus
        if gpus != int(gpus):
            raise ValueError(f"--gpus {gpus:g}: Slurm gives whole GPUs; a share of one is for --engine ray")
        settings = dict(map(_setting, given.slurm or ()))
        cluster = settings.pop("cluster", "slurm")
        return SlurmEngine(out / "slurm", cluster=cluster, gpus=int(gpus), settings=settings)
    from factorized.experiments.reproduce.local import LocalEngine
    from factorized.experiments.training.progress import Reporter

    devices = _devices(given.device, given.workers)
    return LocalEngine(devices, lambda: Reporter(console(quiet=quiet), quiet=quiet), given.at_once or "auto")


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at HOST:PORT, where Ray would try for minutes; other words, such as auto, are Ray's."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except OSError as error:
        raise ValueError(
            f"--address {address}: nothing answers there ({in_words(error)}); start a cluster with `ray start --head`, "
            "or leave --address out to start one here"
        ) from None


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"--slurm takes a parameter of submitit as KEY=VALUE, such as timeout_min=240; got {text!r}")
    return key, int(value) if value.isdigit() else value


def _devices(device: str | None, workers: int | None) -> list[str]:
    import torch

    from factorized.experiments.cli.device import pick_device

    every = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if device is None else []
    every = every or [str(pick_device(device))]
    return [every[number % len(every)] for number in range(workers or len(every))]
