"""What a benchmark writes: rows over the first way, after every group; what is left out says why."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from factorized.experiments.bench.names import BENCHMARKS
from factorized.experiments.bench.run import find_benchmarks, run_benchmarks
from factorized.experiments.bench.session import Session, Way

CPU = torch.device("cpu")


def sleeping(seconds: float, size: int = 1) -> Way:
    kept = torch.ones(size)

    def run() -> None:
        time.sleep(seconds)
        kept.add_(1)

    return Way(run, {"parameters": size})


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # by the wall clock, which sleeps count on
    return Session("name", tmp_path / "folder" / "name.json", CPU, seconds=0.01, say=lambda line: None)


def read(session: Session) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(session.path.read_text())
    return found


def test_rows_are_compared_with_the_first_way(session: Session) -> None:
    session.compare("group", {"slow": partial(sleeping, 0.02, 4096), "fast": partial(sleeping, 0.005, 1024)})
    slow, fast = read(session)["rows"]
    assert (slow["group"], slow["way"], slow["over"], slow["parameters"]) == ("group", "slow", 1.0, 4096)
    assert 0.1 < fast["over"] < 0.9
    assert slow["ms"]["least"] <= slow["ms"]["median"] <= slow["ms"]["largest"]
    assert slow["ms"]["median"] >= 19
    assert fast["memory_over"] == pytest.approx(0.25, abs=0.01)


def test_rows_are_printed_as_a_table_for_80_columns(session: Session) -> None:
    lines: list[str] = []
    session.say = lines.append
    for way, median, over in (("tensorly-torch, Tensor-Train", 1234.0, None), ("dense", 5.5, 0.01)):
        times = {"median": median, "least": 1004.5, "largest": 1305.5, "rounds": 3}
        session.add([{"group": "linear", "way": way, "ms": times, "over": over, "memory": 2**30}])
    session.tell("linear")
    assert lines == [
        "linear (n = 3)",
        "                                  ms             range  of the first      MiB",
        "  tensorly-torch, Tensor-Train  1234  1004.5 to 1305.5                1,024.0",
        "  dense                          5.5  1004.5 to 1305.5          0.01  1,024.0",
    ]
    assert max(map(len, lines)) <= 80


def test_the_file_is_written_after_every_group_with_machine_and_versions(session: Session) -> None:
    session.compare("one", {"a": partial(sleeping, 0)})
    assert len(read(session)["rows"]) == 1
    session.compare("two", {"a": partial(sleeping, 0)})
    report = read(session)
    assert [row["group"] for row in report["rows"]] == ["one", "two"]
    assert report["benchmark"] == "name"
    assert report["clock"] == "wall clock"
    assert report["machine"]["torch"] == torch.__version__
    assert {"device", "threads", "commit", "packages"} <= report["machine"].keys()
    assert "transformers" in report["machine"]["packages"]


def broken() -> Way:
    raise RuntimeError("no such kernel")


def test_a_peer_that_fails_is_left_out_and_says_why(session: Session) -> None:
    session.compare("group", {"ours": partial(sleeping, 0)}, {"theirs": broken, "others": partial(sleeping, 0)})
    report = read(session)
    assert [row["way"] for row in report["rows"]] == ["ours", "others"]
    assert report["skipped"] == ["group: theirs: RuntimeError: no such kernel"]


def too_large() -> Way:
    raise torch.OutOfMemoryError("tried to allocate 1 TiB")


def test_what_does_not_fit_into_memory_is_left_out(session: Session) -> None:
    session.compare("group", {"dense": too_large, "low rank": partial(sleeping, 0)})
    report = read(session)
    assert [row["way"] for row in report["rows"]] == ["low rank"]
    assert report["skipped"] == ["group: dense: OutOfMemoryError: tried to allocate 1 TiB"]


def test_one_of_ours_that_fails_is_an_error(session: Session) -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        session.compare("group", {"ours": broken})


def test_only_leaves_rows_out_and_never_compares_with_another_first(session: Session) -> None:
    session.only = "group: low"
    session.compare("group", {"dense": broken, "low rank": partial(sleeping, 0), "other": broken})
    session.compare("another", {"low rank": broken})
    (row,) = read(session)["rows"]
    assert row["way"] == "low rank"
    assert "over" not in row


def test_every_benchmark_can_be_loaded() -> None:
    for benchmark in BENCHMARKS.values():
        assert callable(benchmark.load())
        assert len(benchmark.about) < 75  # a line of the list


def test_names_are_found_once_and_all_is_every_one() -> None:
    assert find_benchmarks(["decay", "llama", "decay"]) == ["decay", "llama"]
    assert find_benchmarks(["decay", "all"]) == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("name", "meant"), [("lama", "(did you mean 'llama'?)"), ("initialisation", "'initialization'?")]
)
def test_a_wrong_name_is_answered_with_a_near_one(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"there is no benchmark '{name}' .*; there are training, ") as raised:
        find_benchmarks(["decay", name])
    assert meant in str(raised.value)


def test_a_folder_that_cannot_be_written_fails_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factorized.experiments.bench import decay

    monkeypatch.setattr(decay, "compare_decays", lambda session: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        run_benchmarks(["decay"], tmp_path / "file", CPU, say=lambda line: None)


def test_a_run_writes_json_and_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from factorized.experiments.bench import decay

    def measure(session: Session) -> None:
        session.compare("group", {"dense": partial(sleeping, 0), "low rank": partial(sleeping, 0)})

    monkeypatch.setattr(decay, "compare_decays", measure)
    said: list[str] = []
    run_benchmarks(["decay"], tmp_path, CPU, seconds=0.01, say=said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decay.json", "decay.png", "decay.svg"]
    assert "decay: Frobenius decay" in said[0]
    assert said[-1].startswith(str(tmp_path / "decay.json"))
