"""Fused experts of transformers: three-dimensional parameters as batched products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import factorized as fz
from factorized.testing import error

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
every_model = pytest.mark.parametrize("family", OWN)


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **OWN[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # its own initialization is tiny
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(0, 0.3)
    return model


def tokens() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(64, (2, 10))


@every_model
def test_experts_are_products_in_every_implementation_and_come_back_plain(family: str) -> None:
    model, x = tiny(family), tokens()
    expected, names, kinds = model(x).logits, list(model.state_dict()), [type(m) for m in model.modules()]
    fz.factorize(model, fz.Overcomplete(), init="spectral", include=["*experts*"])
    assert {form.kind for form in fz.forms(model)} >= {"experts"}
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(implementation)
        assert error(model(x).logits, expected) < 1e-4
    plain = fz.compose(model)
    assert list(plain.state_dict()) == names
    assert [type(m) for m in plain.modules()] == kinds
    assert error(plain(x).logits, expected) < 1e-4


@every_model
def test_experts_train_and_are_saved_below_full_rank(family: str, tmp_path: Path) -> None:
    model, x = tiny(family), tokens()
    plan = fz.plan(model, rank=3)
    assert {"gate_up_proj", "down_proj"} == {
        e.name.rpartition(".")[2] for e in plan.selected if e.type == "ExpertWeights"
    }
    fz.factorize(model, plan)
    assert sum(p.numel() for p in model.parameters()) == plan.params_after
    optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=0.0), lr=0.1)
    decay = fz.FrobeniusDecay(model, {"experts": 1e-2}).attach(optimizer)
    model(x, labels=x).loss.backward()
    optimizer.step()
    decay.detach()
    assert error(fz.compose(model)(x).logits, model(x).logits) < 1e-4
    fz.save(model, tmp_path / "saved")
    assert error(fz.load(tmp_path / "saved", tiny(family))(x).logits, model(x).logits) == 0
    fz.save_pretrained(model, tmp_path / "pretrained")
    back = fz.from_pretrained(type(model), tmp_path / "pretrained")
    assert error(back(x).logits, model(x).logits) == 0


def test_a_model_with_experts_compiles_whole() -> None:
    torch._dynamo.reset()
    model, x = tiny("Mixtral"), tokens()
    fz.factorize(model, rank=3)
    model.set_experts_implementation("batched_mm")
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert error(compiled(x).logits, model(x).logits) < 1e-4
