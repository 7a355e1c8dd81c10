from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from factorized.experiments.text.masked import MaskedTask
from factorized.experiments.text.network import build_text_network
from factorized.experiments.text.positions import take_positions, taking_positions
from tests.experiments.text.small import small

LOW_RANK = ('factorize.scheme="low_rank"', "factorize.ratio=0.5", 'factorize.init="spectral"')


@pytest.mark.parametrize("changes", [(), LOW_RANK], ids=["dense", "low rank"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_logits_and_gradients_are_those_of_the_predicted_positions(
    tmp_path: Path, changes: tuple[str, ...], compiled: bool
) -> None:
    recipe, corpus = small("masked", tmp_path, *changes)
    model = build_text_network(recipe, corpus.tokenizer, 0)
    tokens = torch.randint(len(corpus.tokenizer), (3, 16))
    positions = torch.tensor([[1, 4], [2, 3], [7, 14]])
    wanted = model(input_ids=tokens).logits[torch.arange(3)[:, None], positions]
    wanted.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    take_positions(model)
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    found = called(input_ids=tokens, positions=positions).logits
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], msg=name)
    assert called(input_ids=tokens).logits.shape == (3, 16, len(corpus.tokenizer))


def test_the_output_layer_sees_the_predicted_tokens_only_in_training_and_in_validation(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path)
    task, model = MaskedTask(recipe, corpus), build_text_network(recipe, corpus.tokenizer, 0)
    seen = []
    model.get_output_embeddings().register_forward_hook(lambda layer, arguments, logits: seen.append(logits.shape[1]))
    predicted = round(0.15 * (recipe.data.length - 2))
    task.validate(model)
    assert set(seen) == {predicted}
    seen.clear()
    task.prepare(model)
    batch = task.collate([task.examples[0], task.examples[1]])
    labels = batch.pop("labels")
    task.loss(model(**batch), labels, torch.tensor(labels.numel())).backward()
    assert seen == [predicted]


def test_a_model_that_takes_positions_already_can_be_validated_and_takes_them_afterwards(tmp_path: Path) -> None:
    recipe, corpus = small("masked", tmp_path)
    task, model = MaskedTask(recipe, corpus), build_text_network(recipe, corpus.tokenizer, 0)
    tokens, positions = torch.ones(1, 8, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)
    before = task.validate(model)
    assert (
        model(input_ids=tokens, positions=positions).logits.shape[1] == 8
    )  # transformers ignores what it does not know
    task.prepare(model)
    assert task.validate(model) == before
    assert model(input_ids=tokens, positions=positions).logits.shape[1] == 2


def mobile_bert() -> nn.Module:
    """Return a model that multiplies by the weight of its output layer and never calls that layer."""
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MobileBertConfig(vocab_size=30, intra_bottleneck_size=8, intermediate_size=16, **sizes)
    return transformers.MobileBertForMaskedLM(config).eval()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("named", [True, False], ids=["its output layer is never called", "it names none"])
def test_a_model_without_a_call_of_its_output_layer_drops_the_other_logits(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mobile_bert()
    if not named:
        monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    tokens, positions = torch.randint(30, (3, 8)), torch.tensor([[1, 4], [2, 3], [6, 7]])
    every = model(input_ids=tokens).logits
    with taking_positions(model):
        found = model(input_ids=tokens, positions=positions).logits
        torch.testing.assert_close(found, every[torch.arange(3)[:, None], positions])
        torch.testing.assert_close(model(input_ids=tokens).logits, every)
