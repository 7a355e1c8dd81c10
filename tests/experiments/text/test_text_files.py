"""Documents and pairs in files, and what is wrong with a file that holds none."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from factorized.experiments.text import text_files
from factorized.experiments.text.text_files import read_documents, read_pairs, read_two_files


def test_documents_stand_between_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\none\ntwo\n\n \nthree\n")
    assert list(read_documents(tmp_path / "a.txt")) == [("one\ntwo\n",), ("three\n",)]


def test_documents_and_lines_that_are_very_long_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST", 10)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    assert list(read_documents(tmp_path / "a.txt")) == [("one\ntwo\nthree\n",), ("four\nfive\n",)]
    (tmp_path / "a.txt").write_text("0123456789" * 3)
    assert list(read_documents(tmp_path / "a.txt")) == [("0123456789",)] * 3


def test_pairs_are_read_from_tsv_and_a_third_column_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("eins\tone\nzwei\ttwo\tCC BY\n")
    assert list(read_pairs(tmp_path / "a.tsv")) == [("eins", "one"), ("zwei", "two")]


def test_the_mark_that_some_editors_put_before_utf_8_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("eins\tone\n", encoding="utf-8-sig")
    assert list(read_pairs(tmp_path / "a.tsv")) == [("eins", "one")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eins\tone\n\nzwei\ttwo\n", r"a\.tsv:2 is empty; expected source, a tab and target .*remove that line"),
        ("eins\n", r"a\.tsv:1: expected source, a tab and target, got 'eins'; two files .* \"train\.{de,en}\""),
        ("eins\t \n", r"a\.tsv:1: expected source, a tab and target"),
        ("eins\tone\n77\tzwei\t78\ttwo\n", r"a\.tsv:2: expected source, .* got 4 columns: '77.*numbers: cut -f 2,4"),
        ("", "a.tsv holds no pairs; expected source"),
    ],
)
def test_lines_that_are_no_pairs_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_pairs(tmp_path / "a.tsv"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("one\n", r"de has 2 lines and .*en 1; every line needs its translation in the other file: give two files"),
        ("one\ntwo\nthree\n\n", r"de has 2 lines and .*en 4; every line"),
        ("one\n\n", r"en:2 is empty; .*: remove that line from both"),
        ("", r"de has 2 lines and .*en 0; every line"),
    ],
)
def test_two_files_that_do_not_match_are_named_with_lines(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "de").write_text("eins\nzwei\n")
    (tmp_path / "en").write_text(target)
    with pytest.raises(ValueError, match=message):
        list(read_two_files(tmp_path / "de", tmp_path / "en"))


def test_two_files_that_are_empty_hold_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "de").write_text("")
    with pytest.raises(ValueError, match="hold no pairs; expected a sentence in every line"):
        list(read_two_files(tmp_path / "de", tmp_path / "de"))


def test_text_that_is_not_utf8_damaged_empty_or_not_readable_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text.*convert it to UTF-8"):
        list(read_documents(tmp_path / "a.txt"))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"hello" * 100)[:-20])
    with pytest.raises(ValueError, match=r"a\.txt\.xz is damaged or truncated.*get it again"):
        list(read_documents(tmp_path / "a.txt.xz"))
    (tmp_path / "b.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=r"b\.txt holds no text; give a file with words"):
        list(read_documents(tmp_path / "b.txt"))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        list(read_documents(tmp_path))
