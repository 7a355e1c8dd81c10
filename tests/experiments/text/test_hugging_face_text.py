"""Text from Hugging Face data sets: folders that ``datasets`` reads, and what is said of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.data.extras import need
from factorized.experiments.recipes.text import Task, TextData
from factorized.experiments.text.hugging_face import open_data_set
from factorized.experiments.text.sources import find_parts, survey
from tests.experiments.text.small import small
from tests.experiments.text.small_squad import paragraph, write_squad

datasets = need("datasets", "datasets", "the tests")
TRANSLATIONS = [{"id": str(n), "translation": {"de": f"wort {n}", "en": f"word {n}"}} for n in range(3)]
COLUMNS = [{"de": f"wort {n}", "en": f"word {n}"} for n in range(3)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, rows: list[dict[str, Any]], split: str = "train", kind: str = "jsonl") -> None:
    """Write rows as one of the kinds of files that ``datasets`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "jsonl":
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    else:
        datasets.DatasetDict({split: datasets.Dataset.from_list(rows)}).save_to_disk(folder)


def read(folder: Path, task: Task, part: str = "train", **data: Any) -> list[Any]:
    return list(find_parts(TextData(**data), task, folder)[part].read())


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_documents_are_the_rows_of_a_folder_in_any_format(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "wiki", [{"text": text, "number": 1} for text in ("one", "", "two")], kind=kind)
    found = read(tmp_path, "language", train=["hf:wiki"], validation=["hf:wiki?split=train"])
    assert found == [("one",), ("two",)]


def test_a_first_row_without_text_does_not_make_another_column_the_text(tmp_path: Path) -> None:
    write(tmp_path / "wiki", [{"title": "One", "text": None}, {"title": "Two", "text": "two"}])
    assert read(tmp_path, "language", train=["hf:wiki"], validation=["hf:wiki?split=train"]) == [("two",)]


def test_each_part_reads_the_split_of_its_name_unless_one_is_named(tmp_path: Path) -> None:
    for split in ("train", "validation", "test"):
        write(tmp_path / "wiki", [{"text": f"for {split}"}], split)
    data: dict[str, Any] = {"train": ["hf:wiki"], "validation": ["hf:wiki"], "test": ["hf:wiki"]}
    assert read(tmp_path, "masked", "train", **data) == [("for train",)]
    assert read(tmp_path, "masked", "validation", **data) == [("for validation",)]
    assert read(tmp_path, "masked", "wiki", **data) == [("for test",)]
    data["train"] = ["hf:wiki?split=train", "hf:wiki?split=test"]
    assert read(tmp_path, "masked", "train", **data) == [("for train",), ("for test",)]


@pytest.mark.parametrize(
    ("rows", "options", "turned"),
    [
        (TRANSLATIONS, "", False),
        (TRANSLATIONS, "?source=en&target=de", True),
        (COLUMNS, "", False),
        (COLUMNS, "?source=en&target=de", True),
        ([row | {"id": "x"} for row in COLUMNS], "?source=de&target=en", False),
        ([*COLUMNS, {"de": "", "en": "lost"}, {"de": "verloren", "en": None}], "", False),
    ],
)
def test_pairs_are_two_columns_or_two_languages_of_translations(
    tmp_path: Path, rows: list[dict[str, Any]], options: str, turned: bool
) -> None:
    write(tmp_path / "pairs", rows)
    found = read(tmp_path, "translation", train=[f"hf:pairs{options}"], validation=["hf:pairs?split=train"])
    expected = [(f"wort {n}", f"word {n}") for n in range(3)]
    assert found == ([pair[::-1] for pair in expected] if turned else expected)


def test_questions_in_rows_are_those_of_the_file(tmp_path: Path) -> None:
    file = write_squad(tmp_path / "squad", train=2)
    rows = []
    for asked in (paragraph(0), paragraph(1)):
        for question in asked["qas"]:
            answers = {key: [answer[key] for answer in question["answers"]] for key in ("text", "answer_start")}
            rows.append({"context": asked["context"], **question, "answers": answers})
    write(tmp_path / "hub", rows, kind="parquet")
    names = {"train": ["train.json"], "validation": ["dev.json"]}
    in_file = read(file, "questions", **names)
    assert read(tmp_path, "questions", **names | {"train": ["hf:hub"], "validation": ["squad/dev.json"]}) == in_file


def test_a_network_is_trained_on_a_data_set_as_on_the_file_with_its_text(tmp_path: Path) -> None:
    _, corpus = small("translation", tmp_path)
    pairs = [line.split("\t") for line in (tmp_path / "train.tsv").read_text().splitlines()]
    write(tmp_path / "pairs", [{"de": source, "en": target} for source, target in pairs])
    _, streamed = small("translation", tmp_path, 'data.train=["hf:pairs"]')
    assert streamed.checksum == corpus.checksum
    assert (streamed.texts["train"][1].tokens == corpus.texts["train"][1].tokens).all()


@pytest.mark.parametrize(
    ("rows", "task", "address", "message"),
    [
        ([{"a": "x", "b": "y"}], "language", "hf:own", r"hf:own: expected one column of text, got a, b.*\?text=COLUMN"),
        ([{"n": 1}], "language", "hf:own", r"expected one column of text, got none among n"),
        ([{"a": "x"}], "language", "hf:own?text=b", r"has no column 'b', it has a; see \?text="),
        ([{"a": 1}], "language", "hf:own?text=a", r"column 'a' must hold text, got 1"),
        ([{"a": "x"}], "language", "hf:own?column=a", r"any of config, revision, split, text.* got hf:own\?column=a"),
        ([{"a": "x"}], "language", "hf:own?split=some", r"could not be loaded \(some\): Bad split: some. Available"),
        ([{"a": "x"}], "language", "hf:own?config=some", r"could not be loaded .*'some' not found. Available:"),
        ([{"de": "x", "en": "y", "fr": "z"}], "translation", "hf:own", r"got de, en, fr.*\?source=COLUMN&target="),
        ([{"de": "x", "en": "y"}], "translation", "hf:own?source=de", r"name both by \?source="),
        ([{"text": "x"}], "questions", "hf:own", "hf:own: expected the columns id, context, question, answers, got te"),
    ],
)
def test_a_data_set_of_another_layout_says_what_to_name(
    tmp_path: Path, rows: list[dict[str, Any]], task: Task, address: str, message: str
) -> None:
    write(tmp_path / "own", rows)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, task, train=[address], validation=["hf:own?split=train"])


def test_a_data_set_that_cannot_be_reached_says_how_to_copy_it(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"hf:some/wiki could not be loaded.*hf download --repo-type dataset some/wiki"
    ):
        open_data_set("hf:some/wiki", "train", tmp_path)


def test_a_data_set_on_the_hub_is_known_by_its_commit_and_not_read_to_be_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Builder:
        """Stands in for the hub, which tests cannot reach."""

        hash, config = "commit 1", type("Config", (), {"name": "default"})
        info = type("Info", (), {"splits": {"train": type("Split", (), {"num_examples": 7})}})

        def as_streaming_dataset(self, split: str) -> Iterator[dict[str, Any]]:
            raise AssertionError(split)
            yield {}

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *place, **options: Builder())
    data = TextData(train=["hf:some/wiki"], validation=["hf:some/wiki?split=train&text=body"])
    before, counts = survey(find_parts(data, "language", tmp_path))
    assert counts == {"train": 7, "validation": 7}
    assert survey(find_parts(data, "language", tmp_path))[0] == before
    monkeypatch.setattr(Builder, "hash", "commit 2")
    assert survey(find_parts(data, "language", tmp_path))[0] != before
