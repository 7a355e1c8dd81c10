"""The pages are true: every block of Python in the README and in docs/ runs, in order, as a reader would run it."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from tests.attention.attention_zoo import GPT2, OwnAttention

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
# Pages of the guide make their own models and data, and their blocks belong together; of these two each block is alone.
WHOLE = [page for page in PAGES if page.parent.name == "guide" and page.stem not in ("loops", "many_gpus")]


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


BLOCKS = {
    f"{page.relative_to(ROOT)}:{number}": code
    for page in PAGES
    if page not in WHOLE
    for number, code in enumerate(blocks_of(page))
}
NET = """
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(*[torch.nn.Linear(i, o) for i, o in ((2, 32), (32, 32), (32, 32), (32, 2))])

    def training_step(self, batch, index):
        return self.body(batch).square().mean()
"""
# What stands for the reader's own code, and how often it trains here.
OTHERWISE = {
    "docs/guide/loops.md:0": {
        "lightning.pytorch as pl": "pytorch_lightning as pl",
        "    ...\n": NET,
        "pl.Trainer(": "pl.Trainer(max_epochs=1, logger=False, enable_progress_bar=False, ",
    },
    "docs/guide/loops.md:1": {"    ...\n": NET},
    "docs/guide/many_gpus.md:0": {'"cuda"': '"cpu"'},
}


class MyAttention(nn.Module):
    """The class that the card on attention registers: four linears and a number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def linears() -> nn.Module:
    extents = (8, 256, 256, 256, 256, 4)
    return nn.Sequential(*[nn.Linear(i, o) for i, o in pairwise(extents)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(8, 64), nn.ModuleList([Block(), Block()]), nn.Linear(64, 4)


def feed_forward() -> nn.Module:
    parts = {"up_proj": nn.Linear(32, 64), "down_proj": nn.Linear(64, 32), "head": nn.Linear(32, 32)}
    return nn.Sequential(nn.Linear(32, 32), nn.ModuleDict(parts))


# The model of the reader, made again for every further line that factorizes it: such lines are alternatives.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "docs/attention.md:0": GPT2.make,
    "docs/frobenius_decay.md:0": lambda: fz.factorize(linears(), ratio=0.5),
    "docs/guide/loops.md:2": feed_forward,
    "docs/guide/many_gpus.md:0": Blocks,
}
NAMES: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md:0": lambda: {"loader": [(torch.randn(2, 8), torch.tensor([0, 3]))]},
    "docs/attention.md:1": lambda: {"MyAttention": MyAttention, "Packed": OwnAttention},
    "docs/guide/loops.md:0": lambda: {"data": torch.randn(4, 2, 2)},
    "docs/guide/loops.md:1": lambda: {"pl": __import__("pytorch_lightning")},
    "docs/guide/loops.md:2": lambda: {"factorized_model": fz.factorize(feed_forward(), ratio=0.5)},
}
# Blocks that need more than one process, and what runs the same calls.
ELSEWHERE = {
    "docs/guide/many_gpus.md:1": "tests/distributed/test_meshes.py::"
    "test_a_distributed_checkpoint_is_read_by_every_mesh_and_by_one_process"
}


@pytest.mark.filterwarnings("ignore")  # of other packages: Lightning's loggers, torch's meshes
@pytest.mark.parametrize(
    "place",
    [place for place in BLOCKS if place not in ELSEWHERE],
)
def test_a_block_of_python_on_a_page_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    if "many_gpus" in place:
        request.getfixturevalue("eight_processes")
    code = BLOCKS[place]
    for own, stand_in in OTHERWISE.get(place, {}).items():
        assert own in code
        code = code.replace(own, stand_in)
    make = MODELS.get(place, linears)
    scope = {"fz": fz, "torch": torch, "model": make(), **NAMES.get(place, dict)()}
    factorized = False
    for statement in ast.parse(code).body:
        if re.search(r"fz\.(factorize|factorize_attention|spectral_init_attention)\(model\b", ast.unparse(statement)):
            scope["model"] = make() if factorized else scope["model"]
            factorized = True
        exec(compile(ast.Module([statement], []), place, "exec"), scope)


@pytest.mark.filterwarnings("ignore")  # of other packages: ONNX's exporter, transformers
@pytest.mark.parametrize("page", WHOLE, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_of_the_guide_run_one_after_another(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope = run_page(page)
    if page.stem == "extending":  # what pytest would run of the contract on the page
        contract = scope["TestShared"]()
        for case in contract.cases:
            contract.test_in_every_execution_it_computes_what_its_dense_layer_does(case)


def run_page(page: Path) -> dict[str, Any]:
    """Run all blocks of a page in one scope, which knows nothing but what they define."""
    module = sys.modules["page"] = types.ModuleType("page")  # where dataclasses look for the types of their fields
    try:
        for number, code in enumerate(blocks_of(page)):
            exec(compile(code, f"{page.name}:{number}", "exec"), module.__dict__)
    finally:
        del sys.modules["page"]
    return module.__dict__


def test_blocks_that_are_run_elsewhere_are_there() -> None:
    for place, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert place in BLOCKS
        assert f"def {name}(" in (ROOT / file).read_text()
    assert not {*OTHERWISE, *MODELS, *NAMES} - {*BLOCKS}


def test_names_and_files_on_the_pages_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("factorized/**/*.py")]
    allowed = {*fz.__all__, "integrations"}
    for page in pages:
        text = page.read_text()
        assert set(re.findall(r"\bfz\.(\w+)", text)) <= allowed, page
        files = re.findall(r"`((?:factorized|tests|benchmarks|docs|results)/[\w/.-]+\.\w+)`", text)
        assert [file for file in files if not (ROOT / file).exists()] == [], page


def test_five_lines_on_the_card_register_a_class() -> None:
    code = BLOCKS["docs/attention.md:1"]
    assert len(code.strip().splitlines()) == 5  # for two classes
    exec(code, {"fz": fz, "MyAttention": MyAttention, "Packed": OwnAttention})
    model = nn.Sequential(MyAttention()).double()
    assert [form.name for form in fz.forms(model)] == ["0.qk", "0.ov"]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = model(x)
    fz.factorize_attention(model, rank_scale=1)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    fz.factorize_attention(nn.Sequential(MyAttention()), rank_scale=0.5)(x.float())
