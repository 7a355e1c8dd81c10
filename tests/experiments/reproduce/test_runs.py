"""Reading results: images and text alike; what cannot be read is named, and stays where it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from factorized.experiments.reproduce.runs import read_run, read_runs
from factorized.experiments.training.folder import FAILURE
from tests.experiments.reproduce.made import image_result, text_result, write

DENSE, LOW = "digits/resnet8", "digits/resnet8-lowrank-0.1"


def test_results_are_found_at_any_depth_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    write(tmp_path, *(image_result(DENSE, seed, 90 + seed / 10) for seed in (0, 2, 10)))
    (tmp_path / DENSE / "seed-0/model").mkdir()
    (tmp_path / DENSE / "seed-0/model/plan.json").write_text("{}")  # of the trained network
    found = read_runs([tmp_path])
    assert [run.seed for run in found.runs] == [0, 2, 10]
    assert found.left_out == found.unfinished == []


@pytest.mark.parametrize(
    ("result", "metric", "score", "by"),
    [
        (image_result(DENSE, 0, 97.5), "accuracy", 97.5, "epoch"),
        (text_result("translation/numbers", 0, "bleu", 31.25), "bleu", 31.25, "update"),
        (text_result("language/tiny", 0, "perplexity", 88.5), "perplexity", 88.5, "update"),
        (text_result("bert/tiny", 0, "loss", 2.75), "loss", 2.75, "update"),
        (text_result("squad/bert-small", 0, "f1", 60), "f1", 60.0, "update"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_task_is_read_in_the_same_words(
    tmp_path: Path, result: dict[str, object], metric: str, score: float, by: str
) -> None:
    (run,) = read_runs([write(tmp_path, result)]).runs
    assert (run.metric, run.score, run.by) == (metric, score, by)
    assert run.figure("nothing of the kind") is None
    assert run.figure("signature") is None


def test_a_damaged_file_is_named_skipped_and_kept(tmp_path: Path) -> None:
    write(tmp_path, image_result(DENSE, 0, 97.0), image_result(DENSE, 1, 98.0), image_result(DENSE, 2, 99.0))
    half, edited = (tmp_path / DENSE / f"seed-{seed}/result.json" for seed in (1, 2))
    half.write_text(half.read_text()[:100])
    edited.write_text(edited.read_text().replace("99.0", "99.9"))
    before = half.read_bytes(), edited.read_bytes()
    found = read_runs([tmp_path])
    assert [run.seed for run in found.runs] == [0]
    assert [file.path for file in found.left_out] == [half, edited]
    assert "not valid JSON" in found.left_out[0].why
    assert "checksum does not match" in found.left_out[1].why
    assert (half.read_bytes(), edited.read_bytes()) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accuracy": None}, "accuracy: must be a valid number, got None"),
        ({"accuracy": 120.0}, "accuracy: must be less than or equal to 100"),
        ({"seed": "0"}, "seed: must be a valid integer"),
        ({"history": [{"epoch": 1, "loss": "low"}]}, "history.0"),
        ({"recipe": {"title": "no name"}}, "recipe.name: Field required"),
        ({"recipe": {"name": "mine", "model": "resnet"}}, "recipe.model"),
        ({"layers": [{"name": "conv1"}]}, "layers.0.kind: Field required"),
        ({"composed": {"accuracy": 90.0}}, "composed.parameters"),
        ({"task": "translation", "score": "bleu", "scores": {}}, "must name a number among scores"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps({**image_result(DENSE, 0, 97.0), **change}))
    with pytest.raises(ValueError, match="not the result of a run") as error:
        read_run(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2]", "it holds no fields"),
        (b'{"plan": 1}', "it has no recipe, seed, parameters"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_other_files_in_a_folder_are_named_too(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "other.json").write_bytes(content)
    (left,) = read_runs([tmp_path]).left_out
    assert message in left.why


def test_what_other_verbs_write_beside_runs_is_passed_over(tmp_path: Path) -> None:
    for path, content in (
        ("bench/layers.json", {"benchmark": "layers", "clock": "wall clock", "rows": []}),
        ("compressed/gpt2-0.7/compress.json", {"before": {}}),
        ("compressed/gpt2-0.7/compressed/plan.json", {"scheme": {}}),
        ("compressed/gpt2-0.7/recovered/result.json", image_result(DENSE, 0, 97.0)),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))
    found = read_runs([tmp_path])
    assert ([run.name for run in found.runs], found.left_out) == ([DENSE], [])
    (left,) = read_runs([tmp_path / "bench/layers.json"]).left_out  # one that was asked for
    assert "it has no recipe" in left.why


def test_a_run_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    result = image_result(DENSE, 0, 97.0)
    first = write(tmp_path / "a", result)
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps({**result, "note": "from elsewhere"}))
    found = read_runs([first, copy, first])
    assert len(found.runs) == 1
    assert [file.path for file in found.left_out] == [copy]
    assert "the same run as" in found.left_out[0].why


def test_runs_of_other_settings_with_the_same_losses_are_other_runs(tmp_path: Path) -> None:
    for kind in ("weight", "none"):
        result = image_result(DENSE, 0, 97.0, f"decay.kind={kind}", "decay.strength=0")
        write(tmp_path / kind, result)
    found = read_runs([tmp_path])
    assert [run.recipe["decay"]["kind"] for run in found.runs] == ["none", "weight"]
    assert found.left_out == []


def test_a_second_run_of_a_seed_is_another_run(tmp_path: Path) -> None:
    other = image_result(DENSE, 0, 96.0)
    found = read_runs([write(tmp_path / "a", image_result(DENSE, 0, 97.0)), write(tmp_path / "b", other)])
    assert len(found.runs) == 2


def test_runs_without_a_result_are_unfinished_or_failed(tmp_path: Path) -> None:
    stopped, failed, silent = (tmp_path / DENSE / f"seed-{seed}" for seed in range(3))
    for folder in (stopped, failed, silent):
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
    (stopped / "metrics.jsonl").write_text('{"epoch": 1, "loss": 2.0}\n{"epoch": 2, "loss": 1.0}\n{"epoch": 3, "lo')
    (failed / FAILURE).write_text(json.dumps({"error": "the training loss is nan"}))
    told = [(run.path, run.reached, run.error) for run in read_runs([tmp_path]).unfinished]
    assert told == [
        (stopped, "epoch 2", None),
        (failed, "nothing recorded", "the training loss is nan"),
        (silent, "nothing recorded", None),
    ]


def test_a_place_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere; give results"):
        read_runs([tmp_path / "nowhere"])
