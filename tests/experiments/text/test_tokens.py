from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from factorized.experiments.recipes.text import TextData
from factorized.experiments.text import tokenizer as tokenizer_module
from factorized.experiments.text import tokens as tokens_module
from factorized.experiments.text.tokenizer import learn_tokenizer, load_tokenizer
from factorized.experiments.text.tokens import pack

TEXTS = ["the cat sat on the mat", "the dog sat on the cat, ünïcode!", "a mat and a cat"]
ITEMS = [(text,) for text in TEXTS]


def _tokenizer(task: str, path: Path, **fields: object):
    return learn_tokenizer(task, TextData(**{"vocabulary": 300, **fields}), TEXTS, path / "tokenizer.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["language", "translation", "masked"])
def test_a_learned_tokenizer_gives_its_own_text_back(tmp_path: Path, task: str) -> None:
    tokenizer = _tokenizer(task, tmp_path)
    for text in TEXTS[:1] if task == "masked" else TEXTS:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_a_tokenizer_is_learned_once(tmp_path: Path) -> None:
    first = _tokenizer("translation", tmp_path)

    again = learn_tokenizer("translation", TextData(vocabulary=300), [], tmp_path / "tokenizer.json")
    assert again.get_vocab() == first.get_vocab()
    assert again(TEXTS[0])["input_ids"][-1] == again.eos_token_id


def test_a_folder_without_a_tokenizer_says_how_to_write_one_there_and_that_works(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "the"]))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is missing; write the model's tokenizer there by "
    ) as caught:
        load_tokenizer(tmp_path)
    command = re.search(r"transformers\.(AutoTokenizer\..*\)), where NAME", str(caught.value))
    assert command is not None
    eval(command[1], {"AutoTokenizer": transformers.AutoTokenizer, "NAME": tmp_path})
    assert load_tokenizer(tmp_path)("the cat")["input_ids"] == [2, 6, 5, 3]


def test_byte_pairs_of_a_language_model_know_every_text(tmp_path: Path) -> None:
    tokenizer = _tokenizer("language", tmp_path)
    assert tokenizer.decode(tokenizer("日本 \t\n")["input_ids"]) == "日本 \t\n"


def test_word_pieces_can_be_read_from_berts_own_file(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "s", "##s", "the"]))
    tokenizer = _tokenizer("masked", tmp_path, vocabulary=str(path), lower=True)
    assert tokenizer("The cats")["input_ids"] == [2, 8, 5, 7, 3]
    path.write_text("cat")
    with pytest.raises(ValueError, match=r"has no \[PAD\].*expected BERT's vocabulary file"):
        _tokenizer("masked", tmp_path / "other", vocabulary=str(path))


@pytest.mark.parametrize(
    ("task", "size", "least"), [("translation", 10, 19), ("masked", 10, 30), ("language", 200, 258)]
)
def test_a_vocabulary_smaller_than_the_characters_is_refused(tmp_path: Path, task: str, size: int, least: int) -> None:
    with pytest.raises(ValueError, match=rf"data.vocabulary = {size} is too small: .* are {least}; ask for more"):
        _tokenizer(task, tmp_path, vocabulary=size)


def test_a_vocabulary_is_learned_from_the_beginning_of_a_very_long_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "LEARNED_FROM", 40)
    words = _tokenizer("translation", tmp_path).get_vocab()
    assert "ü" in words
    assert "▁and" not in words  # in the third text


def test_text_without_a_token_is_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer("masked", tmp_path)
    with pytest.raises(ValueError, match="tokenizing: the text has no tokens; give text with words"):
        pack(tmp_path, {}, lambda: [("",), (" ",)], tokenizer, end=3)
    with pytest.raises(ValueError, match="has no tokens"):
        pack(tmp_path, {}, lambda: [("cat", "")], tokenizer, sides=2, end=3)


def test_packed_texts_are_those_that_were_given_with_an_end_and_are_made_once(tmp_path: Path) -> None:
    tokenizer = _tokenizer("translation", tmp_path)
    (packed,) = pack(tmp_path, {"of": "these"}, lambda: ITEMS, tokenizer, end=2)
    assert len(packed) == 3
    assert packed.words == sum(len(text.split()) for text in TEXTS)
    for number, text in enumerate(TEXTS):
        assert packed[number][-1] == 2
        assert tokenizer.decode(packed[number][:-1]) == text
    assert isinstance(packed.tokens.base, np.memmap)
    assert type(packed.tokens) is np.ndarray
    assert packed.lengths.sum() == len(packed.tokens)

    def unread() -> list[tuple[str]]:
        raise AssertionError

    assert np.array_equal(pack(tmp_path, {"of": "these"}, unread, tokenizer, end=2)[0].tokens, packed.tokens)
    assert len(pack(tmp_path, {"of": "others"}, lambda: ITEMS[:1], tokenizer, end=2)[0]) == 1
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("texts", "characters"), [(2, 10_000), (1000, 30), (1, 1)])
def test_pairs_are_packed_in_one_pass_however_they_are_grouped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, characters: int
) -> None:
    monkeypatch.setattr(tokens_module, "AT_ONCE", texts)
    monkeypatch.setattr(tokens_module, "CHARACTERS", characters)
    tokenizer = _tokenizer("translation", tmp_path)
    passes, told = [], []

    def pairs() -> Iterator[tuple[str, str]]:
        passes.append(1)
        yield from zip(TEXTS, TEXTS[::-1], strict=True)

    sides = pack(
        tmp_path, {}, pairs, tokenizer, sides=2, end=2, progress=lambda *how: told.append(how), stage="dev", total=3
    )
    for side, given in zip(sides, (TEXTS, TEXTS[::-1]), strict=True):
        assert [tokenizer.decode(side[number][:-1]) for number in range(3)] == given
    assert passes == [1]
    assert told[-1] == ("dev", 3, 3)


def test_packing_that_was_killed_is_begun_again(tmp_path: Path) -> None:
    tokenizer = _tokenizer("translation", tmp_path)

    def killed() -> Iterator[tuple[str]]:
        yield ITEMS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path, {}, killed, tokenizer, end=2)
    assert len(pack(tmp_path, {}, lambda: ITEMS, tokenizer, end=2)[0]) == 3
