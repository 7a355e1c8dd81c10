"""Wrong recipes and models of a user's own: each a file, or a function in one, that the verbs refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.hostile.cases import Case, Prepare
from tests.hostile.own_models import FUNCTIONS, NAMES, ONLY_TRAINED
from tests.hostile.place import DIGITS

PRODUCTS_NORMALIZED = "[factorize]\nscheme = 'low_rank'\nratio = 0.1\n[decay]\nkind = 'normalized'"


def own_models() -> Iterator[Case]:
    """Yield models of a user's own that fail, planned and trained."""
    fine_to_plan = {f"own:{name}" for name in (*ONLY_TRAINED, "not_a_number", "infinite")}
    assert len(fine_to_plan) == len(ONLY_TRAINED) + 2 <= len(FUNCTIONS)
    shape = ("--ratio", "0.5", "--size", "8", "--channels", "1")
    for name in NAMES:
        if name not in fine_to_plan:
            yield Case(f"plan --model {name}", ("plan", "--model", name, *shape))
        change = ("--set", f'model.name="{name}"')
        yield Case(f"train {name}", ("train", "dense.toml", "--out", "new", *change))  # where no plan is in its way


def wrong_recipes() -> Iterator[Case]:
    """Yield recipe files that are wrong, shown, planned and trained."""
    deep = 20_000
    texts: dict[str, str | bytes] = {
        "empty": "",
        "no model": "[schedule]\nepochs = 1\n",
        "a word": "hello",
        "an open table": "[model\nname = 'resnet8'",
        "an open text": "[model]\nname = 'resnet8",
        "a table twice": DIGITS + DIGITS,
        "a field twice": "[model]\nname = 'resnet8'\nname = 'resnet8'",
        "not text": b"\xff\xfe\x00\x01" * 20,
        "utf-16": DIGITS.encode("utf-16"),
        "zeros": bytes(100),
        "deep lists": f"x = {'[' * deep}{']' * deep}",
        "deep tables": f"[{'.'.join('a' * deep)}]\nx = 1",
        "an enormous number": DIGITS + f"[run]\nbatch = {'9' * 5000}",
        "json": '{"model": {"name": "resnet8"}}',
        "a section that is a number": "model = 3",
        "a section that is a list": "[[model]]\nname = 'resnet8'",
        "an unknown section": DIGITS + "[nothing]\nx = 1",
        "an unknown field": DIGITS + "[run]\nbatches = 3",
        "a field of another section": DIGITS + "[run]\nepochs = 3",
        "a date": DIGITS + "[run]\nbatch = 1979-05-27",
        "two budgets": DIGITS + "[factorize]\nscheme = 'low_rank'\nratio = 0.1\nrank = 3",
        "no budget": DIGITS + "[factorize]\nscheme = 'low_rank'",
        "a budget without scheme": DIGITS + "[factorize]\nratio = 0.1",
        "decay of no products": DIGITS + "[decay]\nkind = 'frobenius'",
        "normalized without norms": DIGITS + PRODUCTS_NORMALIZED,
        "a name above": "name = '../above'\n" + DIGITS,
        "a name from the root": "name = '/tmp/hostile'\n" + DIGITS,
        "an empty name": "name = ''\n" + DIGITS,
        "a name with a zero byte": 'name = "a\\u0000b"\n' + DIGITS,
        "a name that is a number": "name = 3\n" + DIGITS,
        "extends itself": "extends = 'wrong.toml'\n" + DIGITS,
        "extends in a circle": "extends = 'circle.toml'\n" + DIGITS,
        "extends nothing there": "extends = 'nowhere'\n" + DIGITS,
        "extends nothing": "extends = ''\n" + DIGITS,
        "extends a number": "extends = 3\n" + DIGITS,
        "extends a list": "extends = ['low.toml']\n" + DIGITS,
        "extends a folder": "extends = 'a.toml'\n" + DIGITS,
        "extends notes": "extends = 'notes.txt'\n" + DIGITS,
        "extends a wrong one": "extends = 'broken.toml'\n" + DIGITS,
    }
    verbs = (("recipes", "show"), ("plan",), ("train",))
    for name, text in texts.items():
        for words in verbs:
            yield Case(f"{words[-1]} a recipe: {name}", (*words, "wrong.toml"), _recipe(text))


def _recipe(text: str | bytes) -> Prepare:
    def prepare(folder: Path) -> None:
        (folder / "wrong.toml").write_bytes(text.encode() if isinstance(text, str) else text)
        (folder / "circle.toml").write_text("extends = 'wrong.toml'")
        (folder / "broken.toml").write_text("[model")

    return prepare
