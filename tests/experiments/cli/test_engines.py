"""What ``--engine`` and its options come to."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from factorized.experiments.cli.engines import EngineOptions, make_engine
from factorized.experiments.reproduce.local import LocalEngine
from factorized.experiments.training.progress import Reporter

OUT = Path("out")


@pytest.mark.parametrize(
    ("device", "workers", "devices"),
    [
        (None, None, ("cuda:0", "cuda:1")),
        (None, 3, ("cuda:0", "cuda:1", "cuda:0")),
        (None, 1, ("cuda:0",)),
        ("cpu", None, ("cpu",)),
        ("cpu", 2, ("cpu", "cpu")),
    ],
)
def test_this_machine_has_a_process_for_each_gpu_unless_told_otherwise(
    device: str | None, workers: int | None, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = make_engine(EngineOptions("local", device, workers), OUT, quiet=True)
    assert isinstance(engine, LocalEngine)
    assert engine.devices == devices


@pytest.mark.parametrize(("workers", "at_once", "expected"), [(None, None, "auto"), (1, 4, 4), (2, None, 1), (2, 3, 3)])
def test_seeds_take_turns_unless_processes_share_a_device(
    workers: int | None, at_once: int | None, expected: int | str
) -> None:
    engine = make_engine(EngineOptions("local", "cpu", workers, at_once), OUT, quiet=True)
    assert isinstance(engine, LocalEngine)
    assert engine.at_once == expected


@pytest.mark.parametrize(("devices", "expected"), [(("cuda:0", "cuda:1"), "auto"), (("cuda:0", "cuda:0"), 1)])
def test_automatically_seeds_take_no_turns_where_processes_share_a_device(
    devices: tuple[str, ...], expected: int | str
) -> None:
    assert LocalEngine(devices, lambda: Reporter(quiet=True), "auto").at_once == expected


def test_a_share_of_a_gpu_is_refused_by_slurm() -> None:
    with pytest.raises(ValueError, match=r"--gpus 0.5: Slurm gives whole GPUs; a share of one is for --engine ray"):
        make_engine(EngineOptions("slurm", gpus=0.5), OUT, quiet=True)


def test_slurm_is_not_replaced_by_this_machine_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"--engine slurm: .*srun.* try it on this machine with --slurm cluster=local"):
        make_engine(EngineOptions("slurm"), OUT, quiet=True)


@pytest.mark.parametrize(
    ("address", "place"), [("ray://head:10001", ("head", 10001)), ("[::1]:6379", ("::1", 6379)), ("auto", None)]
)
def test_an_address_is_tried_as_ray_reads_it(
    address: str, place: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(socket, "create_connection", lambda place, _: tried.append(place) or socket.socket())
    make_engine(EngineOptions("ray", address=address), OUT, quiet=True)
    assert tried == ([] if place is None else [place])


def test_an_address_where_no_cluster_listens_is_refused_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody else gets this port, and nothing listens there
        given = EngineOptions("ray", address=f"127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(ValueError, match=r"--address 127.0.0.1:\d+: nothing answers there .* leave --address out"):
            make_engine(given, OUT, quiet=True)
