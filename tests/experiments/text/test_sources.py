"""Where text is found: files, folders, pairs of files, and what is held out of them."""

from __future__ import annotations

import gzip
import lzma
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from factorized.experiments.recipes.find import load_any_recipe
from factorized.experiments.recipes.text import Task, TextData
from factorized.experiments.text import sources
from factorized.experiments.text.sources import Part, find_parts, find_vocabulary, survey


def found(folder: Path, task: Task = "language", **data: Any) -> dict[str, Part]:
    return dict(find_parts(TextData(**data), task, folder))


def write_documents(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(texts))


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_a_file_is_found_by_its_name_compressed_or_not(tmp_path: Path, suffix: str, opener: Any) -> None:
    with opener(tmp_path / f"a.txt{suffix}", "wt") as file:
        file.write("one\n\ntwo\n")
    parts = found(tmp_path, train=["a.txt"], validation=["a.txt"])
    assert list(parts["train"].read()) == [("one\n",), ("two\n",)]


def test_a_folder_is_read_file_by_file_in_sorted_order(tmp_path: Path) -> None:
    write_documents(tmp_path / "wiki" / "b.txt", "third")
    write_documents(tmp_path / "wiki" / "a" / "2.txt", "second")
    (tmp_path / "wiki" / "a" / "1.txt.gz").write_bytes(gzip.compress(b"first"))
    (tmp_path / "wiki" / "README.md").write_text("not text to train on")
    parts = found(tmp_path, train=["wiki"], validation=["wiki/b.txt"])
    assert [text for (text,) in parts["train"].read()] == ["first", "second", "third"]


def test_a_folder_without_such_files_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    with pytest.raises(ValueError, match=r"pairs holds no \.tsv files, compressed or not, it holds nothing"):
        found(tmp_path, "translation", train=["pairs"])
    (tmp_path / "pairs" / "a.csv").write_text("eins,one")
    with pytest.raises(ValueError, match=r"it holds a\.csv; rename its files, or name them one by one"):
        found(tmp_path, "translation", train=["pairs"])


def test_two_files_side_by_side_are_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "train.de").write_text("eins\nzwei\n")
    (tmp_path / "train.en.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    parts = found(tmp_path, "translation", train=["train.{de,en}"], validation=["train.{en,de}"])
    assert list(parts["train"].read()) == [("eins", "one"), ("zwei", "two")]
    assert list(parts["validation"].read()) == [("one", "eins"), ("two", "zwei")]
    with pytest.raises(ValueError, match=r"there is no .*train\.fr \(nor train\.fr\.xz"):
        found(tmp_path, "translation", train=["train.{de,fr}"])


def test_a_missing_file_is_named_with_the_endings_that_were_tried(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.train: there is no .*wiki\.txt \(nor wiki\.txt\.xz.*by --data"):
        found(tmp_path, train=["wiki.txt"])


def test_without_validation_data_one_in_twenty_is_held_out_and_nothing_is_lost(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(45)]
    write_documents(tmp_path / "a.txt", *texts[:30])
    write_documents(tmp_path / "b.txt", *texts[30:])
    parts = found(tmp_path, train=["a.txt", "b.txt"])
    kept, held = ([text.strip() for (text,) in parts[name].read()] for name in ("train", "validation"))
    assert held == ["text 19", "text 39"]
    assert sorted([*kept, *held]) == sorted(texts)
    assert survey(parts)[1] == {"train": 43, "validation": 2}


def test_of_a_large_text_only_so_much_is_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_HELD_OUT", 2)
    write_documents(tmp_path / "a.txt", *(f"text {number}" for number in range(100)))
    parts = found(tmp_path, train=["a.txt"])
    assert [text.strip() for (text,) in parts["validation"].read()] == ["text 19", "text 39"]
    assert len(list(parts["train"].read())) == 98
    assert survey(parts)[1] == {"train": 98, "validation": 2}


def test_too_little_text_to_hold_some_out_asks_for_validation_data(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.txt", *"abc")
    parts = found(tmp_path, train=["a.txt"])
    with pytest.raises(ValueError, match=r"has 3 documents, too few to hold out one in 20; put blank lines between"):
        list(parts["validation"].read())


def test_the_checksum_is_that_of_the_text_wherever_it_is_stored(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.txt", "one", "two", "three")
    write_documents(tmp_path / "many" / "a.txt", "one\n", "two\n")
    (tmp_path / "many" / "b.txt.xz").write_bytes(lzma.compress(b"three"))
    whole, split, other = (
        survey(found(tmp_path, train=[name], validation=["a.txt"]))[0] for name in ("a.txt", "many", "many/a.txt")
    )
    assert whole == split != other


def test_test_sets_are_called_like_their_files_and_may_not_share_a_name(tmp_path: Path) -> None:
    for name in ("a/news.txt", "b/news.txt.gz", "train.txt"):
        write_documents(tmp_path / name, "text")
    both: dict[str, Any] = {"train": ["train.txt"], "validation": ["train.txt"]}
    assert list(found(tmp_path, **both, test=["a/news.txt"])) == ["train", "validation", "news"]
    with pytest.raises(ValueError, match=r"data.test: 'b/news.txt' would be called 'news'.*rename it"):
        found(tmp_path, **both, test=["a/news.txt", "b/news.txt"])
    with pytest.raises(ValueError, match=r"'train.txt' would be called 'train', which is taken"):
        found(tmp_path, **both, test=["train.txt"])


def test_a_vocabulary_is_found_by_its_path_and_in_the_folder_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]")
    assert find_vocabulary(str(tmp_path / "vocab.txt"), None) == tmp_path / "vocab.txt"
    assert find_vocabulary("vocab.txt", tmp_path) == tmp_path / "vocab.txt"
    with pytest.raises(
        ValueError, match=r"there is no nothing\.txt nor .*; expected a file with one word piece a line"
    ):
        find_vocabulary("nothing.txt", tmp_path)


def test_the_page_names_the_files_that_translators_read_and_its_command_makes_them(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/guide/text.md").read_text()
    section = page.partition("## German to English")[2].partition("\n## ")[0]
    for name in ("translation/iwslt14", "translation/tatoeba"):
        data = load_any_recipe(name).data
        assert isinstance(data, TextData)
        told = re.search(f"`{name}`\\s+reads (.*?)[;.]\\s", section, re.DOTALL)
        assert told is not None
        assert re.findall("`(.*?)`", told[1]) == [*data.train, *data.validation, *data.test]
    made, folder = tmp_path / "iwslt14.tokenized.de-en/tmp", tmp_path / "DIR"
    for path in (made, folder):
        path.mkdir(parents=True)
    for part in ("train", "valid", "test"):
        (made / f"{part}.de").write_text(f"das {part}\nund\n")
        (made / f"{part}.en").write_text(f"the {part}\nand\n")
    command = section[section.index("        for part in") : section.index("- **tatoeba**")]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    parts = find_parts(load_any_recipe("translation/iwslt14").data, "translation", folder)  # type: ignore[arg-type]
    assert list(parts["iwslt14-test"].read()) == [("das test", "the test"), ("und", "and")]
    assert [len(list(part.read())) for part in parts.values()] == [2, 2, 2]
