"""A class of transformers at its smallest, made on the spot from a config, and the inputs that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.integrations.zoo.sizes import VOCABULARY

# Classes that compute a part in float32, whatever type their weights have.
PARTLY_FLOAT32 = {
    "DebertaForMaskedLM",
    "Olmo2ForCausalLM",
    "RecurrentGemmaForCausalLM",
    "SwitchTransformersForConditionalGeneration",
}
Inputs = dict[str, Tensor]


def _tokens(length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))


def _noise(*extents: int) -> Tensor:
    return torch.randn(extents, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _boxes(length: int = 12) -> Tensor:
    corners = torch.randint(0, 20, (2, length, 2), generator=torch.Generator().manual_seed(2))
    return torch.cat([corners, corners + 10], -1)


INPUTS: dict[str, Callable[[], Inputs]] = {
    "text": lambda: {"input_ids": _tokens()},
    "long text": lambda: {"input_ids": _tokens(32)},
    "text to text": lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(9)},
    "long text to text": lambda: {"input_ids": _tokens(32), "decoder_input_ids": _tokens(9)},
    "image": lambda: {"pixel_values": _noise(2, 3, 32, 32)},
    "large image": lambda: {"pixel_values": _noise(2, 3, 64, 64)},
    "image and text": lambda: {"pixel_values": _noise(2, 3, 32, 32), "input_ids": _tokens()},
    "sound": lambda: {"input_values": _noise(2, 400)},
    "spectrogram to text": lambda: {"input_features": _noise(2, 8, 40), "decoder_input_ids": _tokens(9)},
    "spectrogram": lambda: {"input_values": _noise(2, 64, 16)},
    "page": lambda: {"input_ids": _tokens(), "bbox": _boxes()},
    "page of an image": lambda: {"input_ids": _tokens(), "bbox": _boxes(), "pixel_values": _noise(2, 3, 32, 32)},
    "bytes": lambda: {"inputs": _tokens()},
    "video": lambda: {"pixel_values": _noise(1, 4, 3, 32, 32)},
    "series": lambda: {"past_values": _noise(2, 32, 3)},
}


@dataclass(frozen=True)
class Tiny:
    """One class of transformers at its smallest, and what it takes."""

    name: str
    takes: str
    settings: Mapping[str, Any]  # of its config

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> float:
        """The relative error that rounding leaves in float64."""
        return 1e-6 if self.name in PARTLY_FLOAT32 else 1e-8

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return the model in evaluation mode, always with the same weights."""
        cls = getattr(transformers, self.name)
        torch.manual_seed(0)
        return cls(cls.config_class(**deepcopy(dict(self.settings)))).to(dtype).eval()

    def inputs(self, dtype: torch.dtype = torch.float64) -> Inputs:
        """Return the arguments of its forward."""
        made = INPUTS[self.takes]()
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in made.items()}


def tiny(name: str, takes: str, base: Mapping[str, Any] | None = None, /, **own: Any) -> Tiny:
    """Return a class with the settings of a family, and its own, for its config."""
    return Tiny(name, takes, {**(base or {}), **own})
