"""The card about attention is true: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

import factorized as fz
from tests.attention.attention_zoo import GPT2, OwnAttention

CARD = (Path(__file__).parent.parent / "docs" / "attention.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", CARD, flags=re.DOTALL)


class MyAttention(nn.Module):
    """What the card registers: four linears and a number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def test_its_first_lines_run_on_a_model() -> None:
    names = {"fz": fz, "torch": torch}
    *calls, rest = BLOCKS[0].split("\n", 5)
    for call in calls:  # five ways to begin, each on a model of its own
        exec(compile(call, "attention.md", "exec"), {**names, "model": GPT2.make()})
    scope = {**names, "model": GPT2.make()}
    exec(compile(rest, "attention.md", "exec"), scope)
    GPT2.run(scope["model"]).sum().backward()
    scope["optimizer"].step()


def test_five_lines_register_a_class() -> None:
    assert len(BLOCKS[1].strip().splitlines()) == 5  # for two classes
    exec(compile(BLOCKS[1], "attention.md", "exec"), {"fz": fz, "MyAttention": MyAttention, "Packed": OwnAttention})
    model = nn.Sequential(MyAttention()).double()
    assert [form.name for form in fz.forms(model)] == ["0.qk", "0.ov"]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = model(x)
    fz.factorize_attention(model, rank_scale=1)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-10)
    fz.factorize_attention(nn.Sequential(MyAttention()), rank_scale=0.5)(x.float())
