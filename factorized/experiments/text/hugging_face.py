"""Text from a Hugging Face data set, streamed row by row: documents, pairs, or the rows themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from factorized.experiments.data.explain import in_words
from factorized.experiments.data.extras import need
from factorized.experiments.data.hugging_face import bars_in_terminals, parse_address
from factorized.experiments.text.text_files import Document, Pair

Row = dict[str, Any]
Rows = Callable[[], Iterator[Row]]  # from the beginning


@dataclass(frozen=True)
class Options:
    """The options after ``?`` in a data set's name; empty ones are detected."""

    config: str = ""
    revision: str = ""
    split: str = ""  # "train", "validation" or "test" unless given, by the field of the recipe
    text: str = ""  # the column of running text
    source: str = ""  # the columns of pairs, or their languages in a column of translations
    target: str = ""


@dataclass(frozen=True)
class DataSet:
    """A split of a data set, whose rows are read as they are needed."""

    address: str
    options: Options
    rows: Rows
    count: int  # of rows; 0 where the data set does not tell
    identity: str  # of a data set on the hub: its commit and what is read of it; empty for a folder


def open_data_set(address: str, part: str, folder: Path) -> DataSet:
    """Return the data set at ``address``, hf:OWNER/NAME?split=SPLIT&text=COLUMN, or hf:PATH for a folder on this disk.

    ``part`` is the split where none is named. Folders are looked for in ``folder`` and in the working folder.
    """
    repository, options = parse_address(address.removeprefix("hf:"), Options)
    local = [path for path in (folder / repository, Path(repository).expanduser()) if path.is_dir()]
    place, split = str(local[0]) if local else repository, options.split or part
    datasets = need("datasets", "datasets", f"the Hugging Face data set {repository}")
    try:
        with bars_in_terminals(datasets):
            builder = datasets.load_dataset_builder(place, options.config or None, revision=options.revision or None)
            stream = builder.as_streaming_dataset(split=split)
    except Exception as error:  # datasets, its file readers and the network raise errors of many types
        download = f"hf download --repo-type dataset {repository} --local-dir DIR"
        remedy = "" if local else f"; without a network, run `{download}` elsewhere, and name its copy as hf:DIR"
        raise ValueError(
            f"the data set {address} could not be loaded ({split}): {in_words(error).rstrip('.')}{remedy}"
        ) from error
    known = (builder.info.splits or {}).get(split)
    identity = "" if local else f"{builder.hash} {builder.config.name} {split} {options}"
    return DataSet(address, options, partial(_rows, address, stream), known.num_examples if known else 0, identity)


def _rows(address: str, stream: Any) -> Iterator[Row]:
    try:
        yield from stream
    except Exception as error:
        raise ValueError(f"{address} could not be read on: {in_words(error)}") from error


def documents_of_rows(data: DataSet) -> Iterator[Document]:
    """Yield the texts of a data set, a row each; rows without text are left out."""
    column = data.options.text
    for row in data.rows():
        column = column or _only_text(row, data.address)
        if (text := _text(row, column, data.address, "text")).strip():
            yield (text,)


def pairs_of_rows(data: DataSet) -> Iterator[Pair]:
    """Yield the pairs of a data set: two of its columns, or two languages of a column of translations.

    Rows that lack one of the two are left out.
    """
    names = (data.options.source, data.options.target)
    for nested in data.rows():
        names = names if all(names) else _two_texts(nested, data)
        row = _flat(nested)
        sides = zip(names, ("source", "target"), strict=True)
        source, target = (_text(row, name, data.address, option).strip() for name, option in sides)
        if source and target:
            yield source, target


def _flat(row: Row) -> Row:
    """Return a row in which the languages of a column of translations are columns."""
    found: Row = {}
    for name, value in row.items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def _texts(row: Row) -> list[str]:
    return [name for name, value in row.items() if isinstance(value, str)]


def _only_text(row: Row, address: str) -> str:
    if isinstance(row.get("text", 0), str | None):  # it may be empty in the first row
        return "text"
    names = _texts(row)
    if len(names) != 1:
        raise ValueError(
            f"{address}: expected one column of text, got {', '.join(names) or 'none'} among {', '.join(row)}; name "
            "one by ?text=COLUMN"
        )
    return names[0]


def _two_texts(row: Row, data: DataSet) -> tuple[str, str]:
    translations = [value for value in row.values() if isinstance(value, dict)]
    names = _texts(translations[0] if len(translations) == 1 else row)
    if len(names) != 2 or data.options.source or data.options.target:
        raise ValueError(
            f"{data.address}: expected two columns of text, source and target, got {', '.join(names) or 'none'} among "
            f"{', '.join(row)}; name both by ?source=COLUMN&target=COLUMN"
        )
    return names[0], names[1]


def _text(row: Row, column: str, address: str, option: str) -> str:
    if column not in row:
        raise ValueError(f"{address} has no column {column!r}, it has {', '.join(row)}; see ?{option}=")
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{address}: column {column!r} must hold text, got {value!r:.60}; see ?{option}=")
    return value or ""
