from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from factorized.experiments.text.sources import (
    find_source,
    find_vocabulary,
    hold_out,
    number_words,
    python_documentation,
    read_documents,
    read_pairs,
    read_two_files,
)


@pytest.mark.parametrize(("suffix", "opener"), [("", open), (".xz", lzma.open), (".gz", gzip.open)])
def test_documents_stand_between_blank_lines_in_plain_and_compressed_files(tmp_path: Path, suffix: str, opener) -> None:
    with opener(tmp_path / f"a.txt{suffix}", "wt") as file:
        file.write("one\ntwo\n\n\nthree\n")
    source = find_source("own", ["a.txt"], [], [], tmp_path)
    assert list(read_documents(source.train)) == ["one\ntwo\n", "three\n"]


def test_pairs_are_read_from_tsv_and_further_columns_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("eins\tone\nzwei\ttwo\tCC BY\n")
    assert list(read_pairs([tmp_path / "a.tsv"])) == [("eins", "one"), ("zwei", "two")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eins\tone\n\nzwei\ttwo\n", r"a\.tsv:2 is empty"),
        ("eins\n", r"a\.tsv:1: expected source, a tab and target, got 'eins'"),
        ("eins\t \n", r"a\.tsv:1: expected source, a tab and target"),
        ("", "a.tsv holds no pairs"),
    ],
)
def test_pairs_that_are_none_are_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_pairs([tmp_path / "a.tsv"]))


def test_two_files_of_unequal_length_are_refused_with_both_counts(tmp_path: Path) -> None:
    (tmp_path / "de").write_text("eins\nzwei\n")
    (tmp_path / "en").write_text("one\n")
    with pytest.raises(ValueError, match=r"de has 2 lines and .*en 1; every line needs its translation"):
        list(read_two_files(tmp_path / "de", tmp_path / "en"))
    (tmp_path / "en").write_text("one\n\n")
    with pytest.raises(ValueError, match=r"en:2 is empty; remove that line from both"):
        list(read_two_files(tmp_path / "de", tmp_path / "en"))
    (tmp_path / "en").write_text("one\ntwo\n")
    assert list(read_two_files(tmp_path / "de", tmp_path / "en")) == [("eins", "one"), ("zwei", "two")]


def test_a_missing_file_is_named_with_the_endings_that_were_tried(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*wiki\.txt \(nor wiki\.txt\.xz.*by --data"):
        find_source("own", ["wiki.txt"], [], [], tmp_path)


def test_text_that_is_not_utf8_damaged_or_empty_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text"):
        list(read_documents([tmp_path / "a.txt"]))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"hello" * 100)[:-20])
    with pytest.raises(ValueError, match=r"a\.txt\.xz is damaged or truncated"):
        list(read_documents([tmp_path / "a.txt.xz"]))
    (tmp_path / "b.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"b\.txt holds no text"):
        list(read_documents([tmp_path / "b.txt"]))


def test_a_twentieth_is_held_out_and_nothing_is_lost() -> None:
    items = [str(number) for number in range(45)]
    kept, held = hold_out(items)
    assert held == ["19", "39"]
    assert sorted([*kept, *held]) == sorted(items)


def test_the_embedded_texts_are_there() -> None:
    assert sum(len(text.split()) for text in python_documentation()) > 20_000
    pairs = number_words(100)
    assert ("einundzwanzig", "twenty-one") in pairs
    assert len(set(pairs)) == 100
    assert pairs != sorted(pairs)


def test_a_vocabulary_is_found_by_its_path_and_in_the_folder_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]")
    assert find_vocabulary(str(tmp_path / "vocab.txt"), None) == tmp_path / "vocab.txt"
    assert find_vocabulary("vocab.txt", tmp_path) == tmp_path / "vocab.txt"
    with pytest.raises(
        ValueError, match=r"there is no nothing\.txt nor .*; expected a file with one word piece a line"
    ):
        find_vocabulary("nothing.txt", tmp_path)
