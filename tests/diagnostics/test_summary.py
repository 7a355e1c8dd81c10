from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import factorized as fz


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(40, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.conv = nn.Conv2d(16, 24, 3)
        self.head = nn.Linear(16, 40)
        self.head.weight = self.table.weight


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def rows(model: nn.Module) -> dict[str, Any]:
    return {row.name: row for row in fz.summary(model).rows}


def test_a_dense_model_is_listed_with_all_of_its_parameters() -> None:
    model = Tied()
    found = fz.summary(model)
    assert [row.name for row in found.rows] == ["table", "attention", "attention.out_proj", "conv", "head"]
    assert found.params == found.dense_params == found.trained == count(model)
    assert rows(model)["conv"].shape == (24, 16, 3, 3)
    assert rows(model)["attention"].heads == "2x8"
    assert rows(model)["attention"].decay == "qk, ov"
    assert rows(model)["head"].params == 40  # its bias: the table holds the weight
    assert "everything else" in str(found)
    assert "of the dense" not in str(found)


def test_a_factorized_model_says_format_rank_execution_and_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    dense = count(model := Tied())
    fz.factorize(model, rank=4, keep_first_and_last=False, attention=False)
    found = fz.summary(model)
    assert found.dense_params == dense
    assert found.params == count(model)
    conv = rows(model)["conv"]
    assert (conv.type, conv.format, conv.rank, conv.decay) == ("FactorizedConv2d", "product", "4", "conv")
    assert conv.execution == model.conv.chosen_execution()
    assert (conv.params, conv.dense_params) == (sum(p.numel() for p in model.conv.parameters()), 24 * 16 * 9 + 24)
    assert rows(model)["table"].dense_params == 40 * 16
    assert rows(model)["head"].dense_params == 40
    (line,) = [line for line in str(found).splitlines() if line.startswith("conv")]
    assert re.split(r"\s{2,}", line)[:5] == ["conv", "FactorizedConv2d", "24x16x3x3", "product", "4"]
    assert f"{found.params / dense:.4f} of the dense {dense:,}" in str(found)


def test_shrunk_attention_counts_what_its_heads_had() -> None:
    dense = count(model := Tied())
    fz.factorize_attention(model, 0.5)
    assert fz.summary(model).dense_params == dense
    assert rows(model)["attention.q_proj"].heads == "2x4 of 8"


def test_lists_of_cores_are_rows_of_their_layer_and_ranks_are_all_shown() -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(64, 48)), fz.TensorTrain(), rank=2, keep_first_and_last=False)
    (row,) = fz.summary(model).rows
    assert row.rank == "x".join(map(str, model[0].rank))
    assert row.params == count(model)


def test_gates_and_experts_have_the_shape_of_the_parameter_that_they_stand_for() -> None:
    model = fz.factorize(nn.Sequential(nn.LSTM(16, 32)), rank=2)
    assert {name: row.shape for name, row in rows(model).items()} == {
        "0.factors.weight_ih_l0": (128, 16),
        "0.factors.weight_hh_l0": (128, 32),
    }
    experts = nn.Module()
    experts.down_proj = nn.Parameter(torch.randn(4, 12, 16))
    model = fz.factorize(nn.Sequential(experts), rank=2)
    assert rows(model)["0.factors.down_proj"].shape == (4, 12, 16)


def test_frozen_parameters_are_not_among_the_trained() -> None:
    model = fz.factorize(nn.Sequential(nn.Linear(8, 8)), fz.Residual(), rank=2, keep_first_and_last=False)
    found = fz.summary(model)
    assert found.trained == 2 * 16 + 8
    assert found.params == found.trained + 64
    assert str(found).endswith(f"{found.trained} are trained")


def test_a_narrow_terminal_gets_fewer_columns_and_a_notebook_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fz.summary(fz.factorize(Tied(), rank=4, keep_first_and_last=False))
    monkeypatch.setenv("COLUMNS", "60")
    lines = str(found).splitlines()
    assert max(map(len, lines[:-1])) <= 60
    assert lines[0].startswith("layer")
    page = found._repr_html_()
    assert page.count("<tr>") == len(found.rows) + 3
    assert "<td>FactorizedConv2d</td>" in page


def test_what_cannot_be_decayed_or_counted_is_still_listed() -> None:
    model = nn.Sequential(fz.FactorizedLinear(8, 8, 2), nn.LazyLinear(4))
    prune.l1_unstructured(model[0], "U", 0.5)
    (row,) = fz.summary(model).rows
    assert (row.name, row.decay) == ("0", "")


def test_names_are_escaped_in_html() -> None:
    found = fz.Summary("<b>", (), 1, 1, 1)
    assert "<b>" not in found._repr_html_()


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be"):
        fz.summary(torch.zeros(2))  # type: ignore[arg-type]
