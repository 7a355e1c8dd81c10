from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

import factorized as fz
from tests.models.zoo import BERT, LLAMA, LLAMA_TIED, Species, logits

TIED = {
    "tied llama": {"lm_head.U": "model.embed_tokens.U", "lm_head.V": "model.embed_tokens.V"},
    "bert": {
        "cls.predictions.decoder.U": "bert.embeddings.word_embeddings.U",
        "cls.predictions.decoder.V": "bert.embeddings.word_embeddings.V",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
}


def factorized(species: Species) -> torch.nn.Module:
    return fz.factorize(species.fresh().eval(), ratio=0.6, keep_first_and_last=False)


@pytest.mark.parametrize("species", [LLAMA_TIED, BERT], ids=lambda species: species.name)
def test_the_notes_name_factors_and_after_composing_weights_again(species: Species) -> None:
    model = factorized(species)
    declared = dict(type(model)._tied_weights_keys)
    assert model._tied_weights_keys == model.all_tied_weights_keys == TIED[species.name]
    assert fz.compose(model)._tied_weights_keys == declared
    assert type(model)._tied_weights_keys == declared  # those of the class are not touched
    assert set(fz.lower(model)._tied_weights_keys) >= {
        f"{target.rpartition('.')[0]}.1.weight" for target in declared if target.endswith("weight")
    }


@pytest.mark.parametrize("species", [LLAMA_TIED, BERT], ids=lambda species: species.name)
def test_tie_weights_ties_factors_that_came_apart(species: Species) -> None:
    model = factorized(species)
    embedding, head = (model.get_submodule(name) for name in species.tied)
    head.U, head.V = (torch.nn.Parameter(torch.zeros_like(factor)) for factor in (head.U, head.V))
    model.tie_weights()
    assert (head.U, head.V) == (embedding.U, embedding.V)
    assert torch.equal(logits(model, species.inputs()), logits(factorized(species), species.inputs()))


def test_a_model_that_is_not_tied_keeps_its_notes() -> None:
    model = factorized(LLAMA)
    assert model._tied_weights_keys == type(model)._tied_weights_keys
    assert model.all_tied_weights_keys == {}
    model.tie_weights()
    assert model.lm_head.U is not model.model.embed_tokens.U


@pytest.mark.parametrize("to_plain", [deepcopy, fz.compose, fz.lower])
def test_a_tied_model_is_saved_by_transformers_in_every_form(to_plain: object, tmp_path: Path) -> None:
    to_plain(factorized(LLAMA_TIED)).save_pretrained(tmp_path)  # type: ignore[operator]
    assert (tmp_path / "model.safetensors").is_file()
