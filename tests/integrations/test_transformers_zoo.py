"""Every architecture of the zoo, through all that is done to a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import factorized as fz
from factorized.integrations.transformers import resize_token_embeddings
from factorized.nn.layer import FactorizedLayer
from factorized.surgery.state import distinct_tensors
from tests.integrations.zoo import MODELS
from tests.integrations.zoo.sizes import VOCABULARY
from tests.integrations.zoo.tiny import Tiny

SAMPLE = ("BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Initializing zero-element tensors is a no-op",  # MobileBERT
)
every_model = pytest.mark.parametrize(
    "tiny", [pytest.param(t, marks=() if t.name in SAMPLE else pytest.mark.nightly, id=t.name) for t in MODELS]
)


def floats(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in what a model returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (dict, list, tuple)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from floats(value)


def run(model: nn.Module, tiny: Tiny) -> list[Tensor]:
    torch.manual_seed(0)
    return list(floats(model(**tiny.inputs(next(model.parameters()).dtype))))


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, tiny: Tiny) -> float:
    """Return the largest error of a model's outputs, relative to the largest entry of each."""
    pairs = list(zip(run(model, tiny), run(other, tiny), strict=True))
    assert pairs
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs if a.numel())


def small(tiny: Tiny, dtype: torch.dtype = torch.float64) -> Any:
    return fz.factorize(tiny.build(dtype), rank_scale=0.25, keep_first_and_last=False)


@every_model
def test_at_full_rank_it_computes_what_the_dense_model_does(tiny: Tiny) -> None:
    model = fz.factorize(tiny.build(), fz.Overcomplete("full"), init="spectral", keep_first_and_last=False)
    assert difference(model, tiny.build(), tiny) < tiny.tolerance


@every_model
def test_a_step_with_frobenius_decay_is_finite_and_differs_from_one_without(tiny: Tiny) -> None:
    models = [small(tiny).train() for _ in range(2)]
    for model, strength in zip(models, (0.0, 1.0), strict=True):
        optimizer = torch.optim.SGD(fz.parameter_groups(model, weight_decay=1e-4), lr=0.01)
        fz.FrobeniusDecay(model, strength).attach(optimizer)
        sum(output.square().mean() for output in run(model, tiny) if output.requires_grad).backward()
        optimizer.step()
    with_decay, without = (torch.cat([p.flatten() for p in model.parameters()]) for model in models)
    assert with_decay.isfinite().all()
    assert not torch.equal(with_decay, without)


@every_model
def test_composed_it_computes_the_same(tiny: Tiny) -> None:
    model = small(tiny)
    assert difference(fz.compose(model), model, tiny) < tiny.tolerance


@every_model
def test_lowered_it_is_plain_and_computes_the_same(tiny: Tiny, recwarn: pytest.WarningsRecorder) -> None:
    model = small(tiny)
    lowered = fz.lower(model)
    assert difference(lowered, model, tiny) < tiny.tolerance
    assert not any(type(module).__module__.startswith("factorized") for module in lowered.modules())
    dense = {name for name, module in model.named_modules() if isinstance(module, FactorizedLayer)} - {
        name for name, module in lowered.named_modules() if isinstance(module, nn.Sequential)
    }
    said = [str(warning.message) for warning in recwarn if str(warning.message).startswith("lowered, ")]
    assert len(said) == bool(dense)  # composed again, and named: its weight is read, or is no layer's (experts)


@every_model
def test_what_is_saved_comes_back_exactly(tiny: Tiny, tmp_path: Path) -> None:
    model = small(tiny)
    fz.save(model, tmp_path)
    assert difference(fz.load(tmp_path, tiny.build()), model, tiny) == 0


@every_model
def test_from_pretrained_gives_the_model_that_was_saved(tiny: Tiny, tmp_path: Path) -> None:
    model = small(tiny, torch.float32)
    fz.save_pretrained(model, tmp_path)
    loaded = fz.from_pretrained(type(model), tmp_path)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert difference(loaded, model, tiny) < 1e-6  # the config does not say how experts are run


@every_model
def test_its_own_tie_weights_leaves_it_as_it_is(tiny: Tiny) -> None:
    model, expected = small(tiny), small(tiny)
    count = sum(parameter.numel() for parameter in model.parameters())
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert difference(model, expected, tiny) == 0


def _resize_and_run(model: Any, tiny: Tiny) -> None:
    resize_token_embeddings(model, VOCABULARY + 6)
    run(model, tiny)


@every_model
@torch.no_grad()
def test_more_tokens_leave_the_others_as_they_were(tiny: Tiny) -> None:
    dense, model = tiny.build(), small(tiny)
    try:
        dense.resize_token_embeddings(VOCABULARY + 6)
        run(dense, tiny)
    except (NotImplementedError, RuntimeError, AttributeError) as error:  # as of images, which have no tokens
        with pytest.raises(type(error)):
            _resize_and_run(model, tiny)
        return
    before = model.get_input_embeddings().weight.clone()
    count = sum(parameter.numel() for parameter in model.parameters())
    embedding = resize_token_embeddings(model, VOCABULARY + 6)
    torch.testing.assert_close(embedding.weight[: len(before)], before)
    mean = before.mean(0).expand(VOCABULARY + 6 - len(before), -1)
    torch.testing.assert_close(
        embedding.weight[len(before) :], mean, rtol=0.01, atol=1e-4
    )  # as transformers draws them
    head = model.get_output_embeddings()
    assert head is None or head.weight.shape[0] == VOCABULARY + 6
    assert [tuple(output.shape) for output in run(model, tiny)] == [tuple(output.shape) for output in run(dense, tiny)]
    assert sum(parameter.numel() for parameter in model.parameters()) > count


@every_model
def test_its_own_save_pretrained_writes_every_parameter_once(tiny: Tiny, tmp_path: Path) -> None:
    for model in (small(tiny), fz.compose(small(tiny))):
        model.save_pretrained(tmp_path, save_original_format=False)
        saved, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
        kept = {name: tensor for name, tensor in state.items() if name not in model._keys_to_ignore_on_save}
        assert sum(t.numel() for t in saved.values()) == sum(t.numel() for t in distinct_tensors(kept)[0].values())
        assert all(torch.equal(tensor, state[name]) for name, tensor in saved.items())
