"""Error messages for failures of the system, of input data and of user code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from factorized.version import PACKAGE

if TYPE_CHECKING:
    from pydantic import ValidationError


def in_words(error: BaseException, *, named: bool = True) -> str:
    """Return an exception's message in one line, without its errno; with ``named``, including the file."""
    if isinstance(error, SystemExit):
        return f"it exits with {error.code!r}"
    if isinstance(error, OSError) and error.strerror is not None:
        return f"{error.filename}: {error.strerror}" if named and error.filename is not None else error.strerror
    return " ".join(str(error).split())


@contextmanager
def writing_to(place: Path, remedy: str) -> Iterator[None]:
    """Turn a failed write into a ``ValueError`` that says where, why, and what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write to {place}: {in_words(error, named=False)}; {remedy}") from None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return " (did you mean 'x'?)" for the known word that is most like ``word``; nothing if none is."""
    found = get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {found[0]!r}?)" if found else ""


def rule(message: str) -> str:
    """Return a message of pydantic as a rule, such as "must be a valid number"."""
    return message.removeprefix("Value error, ").replace("Input should be", "must be")


def first_problem(error: ValidationError) -> str:
    """Return the first place where data are invalid, what is expected there and what was found."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "the file"
    got = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
    return f"{where}: {rule(first['msg'])}{got}"


def place_and_reason(error: BaseException) -> str:
    """Return the line of the user's code that failed, and why; the last line outside of installed packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first one is ours
    own = [f for f in frames if "site-packages" not in f.filename and Path(f.filename).is_file()]
    own = [f for f in own if not f.filename.startswith((sys.base_prefix, str(PACKAGE)))]
    place = f"at {own[-1].filename}:{own[-1].lineno}" if own else "outside of your code"
    return f"{place}: {type(error).__name__}: {in_words(error)}"
