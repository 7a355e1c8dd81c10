from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import factorized as fz
from factorized.integrations.peft import LoraFactorizedLinear, on_factorized


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(12, 20), nn.Linear(20, 12, bias=False), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def net(scheme: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return fz.factorize(Net().double(), scheme or fz.LowRank(), rank=4, include=["up", "down"])


def config(**options: Any) -> Any:
    return on_factorized(
        peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["up", "down", "head"]} | options)
    )


def x(features: int = 12) -> Tensor:
    return torch.randn(7, features, generator=torch.Generator().manual_seed(1)).double()


def adapted(model: nn.Module | None = None, **options: Any) -> Any:
    model = peft.get_peft_model(net() if model is None else model, config(**options))
    return model.double()  # peft keeps adapters in float32


def train(model: nn.Module, steps: int = 3) -> nn.Module:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x()), torch.arange(7) % 5).backward()
        optimizer.step()
    return model.eval()


def test_without_registration_peft_refuses_a_factorized_layer() -> None:
    with pytest.raises(ValueError, match="is not supported"):
        peft.get_peft_model(net(), peft.LoraConfig(target_modules=["up"]))


def test_all_linear_which_would_pass_factorized_layers_over_is_refused() -> None:
    with pytest.raises(ValueError, match="finds only plain linears; name the layers"):
        on_factorized(peft.LoraConfig(target_modules="all-linear"))


def test_adapters_start_as_nothing_and_are_all_that_trains() -> None:
    model = adapted()
    torch.testing.assert_close(model(x()), net()(x()))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 6
    assert all("lora_" in name for name in trained)
    train(model)
    assert torch.equal(model.base_model.model.up.base_layer.U, net().up.U)
    assert not torch.allclose(model(x()), net()(x()))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_bias": True, "target_modules": ["up"]}])
def test_a_merge_is_exact_and_leaves_a_wider_factorized_layer(options: dict[str, Any]) -> None:
    model = train(adapted(**options))
    expected = model(x())
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x()), expected)
    assert type(merged.up) is fz.FactorizedLinear
    assert merged.up.rank == 6
    assert not any("lora" in name for name, _ in merged.named_modules())
    torch.testing.assert_close(fz.compose(merged)(x()), expected)


@pytest.mark.filterwarnings("ignore:Already following adapters were merged")
def test_unmerging_takes_out_all_adapters_also_if_they_were_merged_one_by_one() -> None:
    model = adapted()
    model.add_adapter("second", config())
    layer = model.double().base_model.model.up
    before = layer.get_base_layer()
    for name in ("default", "second"):
        nn.init.normal_(layer.lora_B[name].weight)
        layer.merge(adapter_names=[name])
    assert layer.get_base_layer().rank == 4 + 2 + 2
    layer.unmerge()
    assert layer.get_base_layer() is before
    assert not layer.merged


def test_a_merge_keeps_hooks_attributes_and_the_way_a_layer_runs() -> None:
    base = net()
    base.up.execution, base.up.drop_connect = "composed", 0.25
    calls: list[int] = []
    base.up.register_forward_hook(lambda *_: calls.append(1))
    merged = train(adapted(base)).merge_and_unload()
    calls.clear()
    merged(x())
    assert calls == [1]
    assert (merged.up.execution, merged.up.drop_connect) == ("composed", 0.25)


def test_merging_and_unmerging_gives_the_very_factors_back() -> None:
    model = train(adapted())
    expected, U = model(x()), model.base_model.model.up.base_layer.U
    model.merge_adapter()
    assert model.base_model.model.up.base_layer.rank == 6
    torch.testing.assert_close(model(x()), expected)
    model.unmerge_adapter()
    assert model.base_model.model.up.base_layer.U is U
    torch.testing.assert_close(model(x()), expected)
    with model.disable_adapter():
        torch.testing.assert_close(model(x()), net()(x()))


def test_two_adapters_are_merged_one_after_the_other() -> None:
    model = train(adapted())
    model.add_adapter("second", config(r=3, init_lora_weights=False))
    model.double().base_model.set_adapter(["default", "second"])
    expected = model(x())
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x()), expected)
    assert merged.up.rank == 4 + 2 + 3


def test_saved_adapters_are_read_onto_a_factorized_model(tmp_path: Path) -> None:
    model = train(adapted())
    model.save_pretrained(tmp_path)
    read = on_factorized(peft.LoraConfig.from_pretrained(tmp_path))
    again = peft.PeftModel.from_pretrained(net(), tmp_path, config=read).double()
    torch.testing.assert_close(again(x()), model(x()), rtol=1e-6, atol=1e-6)
    assert isinstance(again.base_model.model.up, LoraFactorizedLinear)


def test_deep_products_are_merged_exactly() -> None:
    base = nn.Sequential(fz.FactorizedLinear(12, 12, 4, depth=2).double())
    model = adapted(base, target_modules=["0"], init_lora_weights=False).eval()
    expected = model(x())
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x()), expected)
    assert merged[0].format.depth == 2


def test_transposed_weights_of_gpt2_are_merged_exactly() -> None:
    conv1d = transformers.pytorch_utils.Conv1D
    torch.manual_seed(0)
    base = nn.Sequential(conv1d(10, 12).double())
    base[0] = fz.FactorizedLinear.from_dense(base[0], 3, transposed=True)
    model = adapted(base, target_modules=["0"], init_lora_weights=False, fan_in_fan_out=True).eval()
    expected = model(x())
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x()), expected)
    assert merged[0].rank == 5


@pytest.mark.parametrize("scheme", [fz.Tucker, fz.Monarch])
def test_other_formats_train_adapters_and_are_merged_once_composed(scheme: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    base = fz.factorize(Net().double(), scheme(), rank_scale=0.5, include=["up", "down"])
    model = train(adapted(base))
    expected = model(x())
    with pytest.raises(ValueError, match=r"cannot absorb a product exactly.*fz\.compose"):
        model.merge_adapter()
    torch.testing.assert_close(model(x()), expected)
    merged = fz.compose(model).merge_and_unload()
    torch.testing.assert_close(merged(x()), expected)
    assert type(merged.up) is nn.Linear


def test_adapters_beside_lowered_layers_act_and_are_to_be_merged_before() -> None:
    model = train(adapted())
    lowered = fz.lower(model)
    torch.testing.assert_close(lowered(x()), model(x()))
    with pytest.raises(ValueError, match=r"cannot be merged into the layers that fz\.lower makes; merge it before"):
        lowered.merge_and_unload()


def test_an_adapter_that_is_not_finite_is_not_merged_safely() -> None:
    model = adapted()
    nn.init.constant_(model.base_model.model.up.lora_B["default"].weight, float("nan"))
    with pytest.raises(ValueError, match="NaN or infinite"):
        model.merge_adapter(safe_merge=True)
    assert model.base_model.model.up.base_layer.rank == 4


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}])
def test_initializations_that_write_to_the_weight_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="changes the weight of the layer"):
        adapted(**options)


def test_variants_of_lora_are_refused() -> None:
    with pytest.raises(ValueError, match="use_dora"):
        adapted(use_dora=True)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers 5.23
def test_a_transformers_model_with_factorized_layers_is_adapted_trained_and_merged() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes))
    fz.factorize(llama, rank=6, include=["*.mlp.*"])
    model = adapted(llama.double(), target_modules=["q_proj", "up_proj", "down_proj"], task_type="CAUSAL_LM")
    tokens = torch.arange(12).view(2, 6)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model.eval()(input_ids=tokens).logits
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(input_ids=tokens).logits, expected)
    assert merged.model.layers[0].mlp.up_proj.rank == 8


TIED: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied")  # peft compares composed weights
@pytest.mark.parametrize("saved_by", ["factorized", "transformers"])
@pytest.mark.parametrize(
    ("make", "layer"),
    [
        (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TIED, intermediate_size=24)), "query"),
        (
            lambda: transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**TIED, intermediate_size=24, tie_word_embeddings=True)
            ),
            "q_proj",
        ),
    ],
    ids=["bert", "llama"],
)
def test_tied_embeddings_of_a_merged_model_come_back_tied(
    make: Callable[[], Any], layer: str, saved_by: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    dense = make().eval()
    base = fz.factorize(dense, rank=4, min_size=0, keep_first_and_last=False)
    merged = peft.get_peft_model(base, config(target_modules=[layer], init_lora_weights=False)).merge_and_unload()
    if saved_by == "transformers":
        merged.save_pretrained(tmp_path)
        fz.save_plan(merged, tmp_path)
    else:
        fz.save_pretrained(merged, tmp_path)
    back, ids = fz.from_pretrained(type(dense), tmp_path), torch.arange(10).reshape(2, 5)
    torch.testing.assert_close(back(ids).logits, merged(ids).logits)
    ends = back.get_input_embeddings(), back.get_output_embeddings()
    assert ends[0].factors[0] is ends[1].factors[0]
    assert back.config.tie_word_embeddings == merged.config.tie_word_embeddings
