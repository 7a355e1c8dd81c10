from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.attention.cost import attention_spectrum
from factorized.attention.register import read_attention


class Grouped(nn.Module):
    """Four query heads of three dimensions over two K/V heads; nothing here runs it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = 4, 2
        self.q, self.o = nn.Linear(8, 12, bias), nn.Linear(12, 8, bias)
        self.k, self.v = nn.Linear(8, 6, bias), nn.Linear(8, 6, bias)


def by_head(layer: nn.Linear, head: int, bias: bool) -> Tensor:  # (in, or one more with the bias, 3)
    part = slice(3 * head, 3 * head + 3)
    rows = [layer.weight[part].T] + ([layer.bias[part][None]] if bias else [])
    return torch.cat(rows)


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_it_is_summed_over_the_explicit_products_of_all_heads_that_share_a_head(bias: bool) -> None:
    torch.manual_seed(0)
    fz.register_attention(Grouped, query="q", key="k", value="v", output="o", heads="heads", kv_heads="kv_heads")
    module = Grouped(bias).double()
    expected = {"qk": torch.zeros(3, dtype=torch.float64), "ov": torch.zeros(3, dtype=torch.float64)}
    for shared in range(2):
        own = (2 * shared, 2 * shared + 1)
        queries = torch.cat([by_head(module.q, head, bias) for head in own])
        outputs = torch.cat([module.o.weight[:, 3 * head : 3 * head + 3] for head in own])
        products = {
            "qk": queries @ by_head(module.k, shared, bias).T,
            "ov": by_head(module.v, shared, bias=False) @ outputs.T,
        }
        for kind, product in products.items():
            expected[kind] += torch.linalg.svdvals(product)[:3] ** 2
    read = read_attention("", module)
    assert read is not None
    assert read.unit is not None
    for kind, squares in expected.items():
        torch.testing.assert_close(attention_spectrum("", read.unit, (kind,)), squares)
    torch.testing.assert_close(attention_spectrum("", read.unit, ("qk", "ov")), expected["qk"] + expected["ov"])
