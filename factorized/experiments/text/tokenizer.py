"""Tokenizers, learned from the training text or read from a list of word pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factorized.experiments.data.extras import need
from factorized.experiments.recipes.text import Task, TextData
from factorized.files.atomic import write_whole

TOKENIZER = "tokenizer.json"  # in the folder of a model
PAD, UNKNOWN, END = "<pad>", "<unk>", "</s>"
BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
BERT_PIECES = 30_522  # of the published uncased vocabulary
LEARNED_FROM = 500_000_000  # characters: memory for counting words grows with the text
SPECIAL: dict[Task, dict[str, str]] = {
    "language": {"pad_token": PAD, "eos_token": END},
    "translation": {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END},
    "masked": BERT,
    "questions": BERT,
}


def learn_tokenizer(task: Task, data: TextData, texts: Iterable[str], path: Path) -> Any:
    """Return a fast tokenizer of transformers, learned from ``texts`` into ``path``, or the one that is there.

    Word pieces for BERT; byte pairs for the others. A language model gets byte-level pairs, so that no text is unknown
    to it; a translator gets one vocabulary for both languages.
    """
    tokenizers = need("tokenizers", "tokenizers", f"task {task!r}", "text")
    if path.is_file():
        model = tokenizers.Tokenizer.from_file(str(path))
    else:
        if isinstance(data.vocabulary, str):
            model = _given_word_pieces(tokenizers, Path(data.vocabulary), data.lower)
        else:
            learn = _learn_word_pieces if SPECIAL[task] is BERT else _learn_byte_pairs
            model = learn(tokenizers, task, data.vocabulary, data.lower, _first(texts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda temporary: model.save(str(temporary)))
    fast = need("transformers", "transformers", f"task {task!r}", "text").PreTrainedTokenizerFast
    types = ["token_type_ids"] if SPECIAL[task] is BERT else []  # which of two texts a token belongs to
    inputs = ["input_ids", *types, "attention_mask"]
    return fast(tokenizer_object=model, clean_up_tokenization_spaces=False, model_input_names=inputs, **SPECIAL[task])


def _first(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts until there is enough to learn a vocabulary from."""
    left = LEARNED_FROM
    for text in texts:
        if left <= 0:
            return
        yield text
        left -= len(text)


def _learn_byte_pairs(tokenizers: Any, task: Task, size: int, lower: bool, texts: Iterable[str]) -> Any:
    before = tokenizers.pre_tokenizers
    special = list(SPECIAL[task].values())
    model = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=SPECIAL[task].get("unk_token")))
    alphabet: list[str] = []
    if task == "language":
        model.pre_tokenizer, model.decoder = before.ByteLevel(add_prefix_space=False), tokenizers.decoders.ByteLevel()
        alphabet = before.ByteLevel.alphabet()
    else:
        steps = [tokenizers.normalizers.NFC(), *([tokenizers.normalizers.Lowercase()] if lower else [])]
        model.normalizer = tokenizers.normalizers.Sequence(steps)
        model.pre_tokenizer, model.decoder = before.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    _check_learned(model, size, len(special) + len(alphabet))
    if task == "translation":
        model.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, model.token_to_id(END))]
        )
    return model


def _learn_word_pieces(tokenizers: Any, task: Task, size: int, lower: bool, texts: Iterable[str]) -> Any:
    special = list(SPECIAL[task].values())
    model = _word_piece_model(tokenizers, lower, tokenizers.models.WordPiece(unk_token=BERT["unk_token"]))
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    model.train_from_iterator(texts, trainer)
    _check_learned(model, size, len(special))
    return _with_ends(tokenizers, model)


def _given_word_pieces(tokenizers: Any, path: Path, lower: bool) -> Any:
    pieces = {piece: number for number, piece in enumerate(path.read_text(encoding="utf-8").splitlines())}
    missing = [token for token in BERT.values() if token not in pieces]
    if missing:
        raise ValueError(f"data.vocabulary: {path} has no {', '.join(missing)}; expected BERT's vocabulary file")
    piece = tokenizers.models.WordPiece(pieces, unk_token=BERT["unk_token"])
    return _with_ends(tokenizers, _word_piece_model(tokenizers, lower, piece))


def _word_piece_model(tokenizers: Any, lower: bool, piece: Any) -> Any:
    model = tokenizers.Tokenizer(piece)
    model.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower)
    model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    model.decoder = tokenizers.decoders.WordPiece()
    return model


def _with_ends(tokenizers: Any, model: Any) -> Any:
    first, last = ((token, model.token_to_id(token)) for token in (BERT["cls_token"], BERT["sep_token"]))
    model.post_processor = tokenizers.processors.BertProcessing(last, first)
    return model


def _check_learned(model: Any, size: int, given: int) -> None:
    learned = model.get_vocab_size()
    if learned > size:
        raise ValueError(
            f"data.vocabulary = {size} is too small: characters and special tokens alone are {learned}; ask for more"
        )
    if learned <= given:
        raise ValueError("the training text has no tokens to learn; give text with words")


@dataclass(frozen=True)
class StandIn:
    """A stand-in for a tokenizer, enough to build a network: the size of its vocabulary."""

    size: int
    pad_token_id: int = 0
    eos_token_id: int = 1

    def __len__(self) -> int:
        return self.size


def stand_in_tokenizer(data: TextData) -> StandIn:
    """Return a stand-in of the recipe's vocabulary; a file of word pieces that is not there counts as BERT's."""
    if isinstance(data.vocabulary, int):
        return StandIn(data.vocabulary)
    path = Path(data.vocabulary)
    return StandIn(len(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else BERT_PIECES)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model's folder holds a tokenizer that can be loaded."""
    return (folder / TOKENIZER).is_file()


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer that was saved beside a model."""
    if not has_tokenizer(folder):
        raise ValueError(
            f"{folder / TOKENIZER} is missing; write the model's tokenizer there by transformers.AutoTokenizer."
            f"from_pretrained(NAME).save_pretrained({str(folder)!r}), where NAME is the model on the hub, or a folder "
            "that holds its vocabulary"
        )
    fast = need("transformers", "transformers", "text", "text").PreTrainedTokenizerFast
    try:
        return fast.from_pretrained(folder)
    except Exception as error:  # of any kind, from the Rust library too
        raise ValueError(
            f"{folder / TOKENIZER} cannot be read ({type(error).__name__}: {error}); write it again by "
            "tokenizer.save_pretrained(folder)"
        ) from error


def state_of(tokenizer: Any) -> str:
    """Return a checksum of all that decides which tokens a text becomes."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding"):  # of the latest call
        del state[setting]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()
