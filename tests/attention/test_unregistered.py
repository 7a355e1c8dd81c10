from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.attention.register import _registered, find_attention
from tests.attention.attention_zoo import SIZES, VOCABULARY, tokens


class UnknownAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(8, 8) for _ in range(4))


@pytest.mark.parametrize("call", [fz.factorize_attention, fz.spectral_init_attention])
def test_a_class_nobody_registered_is_named_with_the_five_lines(call: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), UnknownAttention())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="nobody registered") as raised:
        call(model)
    text = str(raised.value)
    assert text.startswith("1: ")
    call_text = text[text.index("fz.register_attention(") : text.index(")\n") + 1]
    assert "UnknownAttention," in call_text
    assert len(call_text.splitlines()) == 5
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert fz.forms(model) == []


def electra() -> nn.Module:
    from transformers import ElectraConfig, ElectraModel

    return ElectraModel(ElectraConfig(embedding_size=24, **SIZES))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertModel

    sizes = {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 1, "n_heads": 3, "hidden_dim": 32}
    return DistilBertModel(DistilBertConfig(**sizes))


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=VOCABULARY, d_model=24, d_kv=10, d_ff=32, num_layers=1, num_heads=3))


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2Model

    return Qwen2Model(Qwen2Config(num_key_value_heads=1, **SIZES))


BERT_LIKE = ("self.query", "self.key", "self.value", "output.dense")
FAMILIES: list[tuple[Any, str, tuple[str, ...], dict[str, Any]]] = [
    (electra, "ElectraAttention", BERT_LIKE, {"heads": "self.num_attention_heads"}),
    (distilbert, "DistilBertSelfAttention", ("q_lin", "k_lin", "v_lin", "out_lin"), {"heads": "n_heads"}),
    (t5, "T5Attention", ("q", "k", "v", "o"), {"heads": "n_heads"}),
    (
        qwen2,
        "Qwen2Attention",
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        {"heads": "config.num_attention_heads", "kv_heads": "config.num_key_value_heads", "rotary": True},
    ),
]
every_family = pytest.mark.parametrize(("build", "name", "linears", "rest"), FAMILIES)


def trained_like(build: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def padded(model: nn.Module) -> Tensor:
    mask = torch.ones_like(tokens())
    mask[1, 4:] = 0
    out: Tensor = model(tokens(), attention_mask=mask).last_hidden_state
    return out[mask.bool()]


@every_family
def test_the_class_that_holds_all_of_the_linears_is_named_with_them(
    build: Any, name: str, linears: tuple[str, ...], rest: dict[str, Any]
) -> None:
    model = trained_like(build)
    with pytest.raises(ValueError, match=f"nobody registered {name} of transformers.models") as raised:
        fz.factorize_attention(model)
    assert f"# of its linears: {', '.join(linears)}\n" in str(raised.value)


@every_family
def test_where_heads_are_cut_none_of_its_linears_is_factorized_behind_its_back(
    build: Any, name: str, linears: tuple[str, ...], rest: dict[str, Any]
) -> None:
    model = trained_like(build)
    attention = [found.name for found in find_attention(model)]
    assert [type(model.get_submodule(place)).__name__ for place in attention] == [name]
    plan = fz.plan(model, rank=2, attention="heads")
    assert "nobody registered" in {entry.name: entry.reason or "" for entry in plan.skipped}[attention[0]]
    assert not any(entry.name.startswith(attention[0]) for entry in plan.selected)
    assert plan.selected


@every_family
@torch.no_grad()
def test_the_five_lines_filled_in_are_all_it_takes(
    build: Any, name: str, linears: tuple[str, ...], rest: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained_like(build)
    cls = type(next(find_attention(model)).module)
    monkeypatch.setitem(_registered, cls, lambda module: None)  # so that what is registered here is gone afterwards
    query, key, value, output = linears
    fz.register_attention(
        cls,
        query=query, key=key, value=value, output=output,
        **rest,
    )  # fmt: skip
    forms = ("ov",) if rest.get("rotary") else ("qk", "ov")
    expected = padded(model)
    fz.spectral_init_attention(model, forms=forms)
    tolerance = 1e-5 if rest.get("rotary") else 1e-10  # such models have norms that compute in float32
    assert (padded(model) - expected).abs().max() < tolerance
    small = fz.factorize_attention(model, 0.5, forms=forms)
    assert [form.U.shape[-1] for form in fz.forms(small) if form.kind == "ov"] == [5 if name == "T5Attention" else 4]
    assert (padded(fz.compose(small)) - padded(small)).abs().max() < 1e-10


@pytest.mark.parametrize(("argument", "name"), [("query", 3), ("heads", ""), ("heads", None), ("head_size", 8)])
def test_names_that_are_none_are_refused_when_they_are_registered(argument: str, name: Any) -> None:
    names = {"query": "to_q", "key": "to_k", "value": "to_v", "output": "to_out", "heads": "heads", argument: name}
    with pytest.raises(
        ValueError, match=f"{argument} must be the dotted name of an attribute of UnknownAttention, got"
    ):
        fz.register_attention(UnknownAttention, **names)
    assert UnknownAttention not in _registered


class ThreeLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 8) for _ in range(3))


class InnerAttention(ThreeLinears):
    pass


class PackedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


class AttentionWithFeedForward(nn.Module):
    def __init__(self, inner: nn.Module, linears: int) -> None:
        super().__init__()
        self.inner = inner
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(linears))


@pytest.mark.parametrize(
    ("inner", "others", "found"),
    [
        (InnerAttention, 1, ""),  # the output is outside
        (InnerAttention, 2, "inner"),
        (PackedAttention, 1, "inner"),
        (PackedAttention, 2, "inner"),
        (UnknownAttention, 0, "inner"),
        (UnknownAttention, 1, "inner"),
        (ThreeLinears, 1, ""),
    ],
)
def test_a_block_around_whole_attention_is_not_taken_for_it(inner: Any, others: int, found: str) -> None:
    model = AttentionWithFeedForward(inner(), others)
    assert [read.name for read in find_attention(model)] == [found]
