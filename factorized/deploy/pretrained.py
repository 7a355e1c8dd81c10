"""``fz.save_pretrained`` and ``fz.from_pretrained``: checkpoints of transformers models that are factorized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.deploy.checkpoint import MANIFEST, load, save
from factorized.deploy.state import unwrapped

GENERATION = "generation_config.json"


def save_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Write a factorized transformers model: its config files as transformers does, weights and plan as ``fz.save``."""
    inside: Any = unwrapped(model)
    config = getattr(inside, "config", None)
    if config is None or not callable(getattr(config, "save_pretrained", None)):
        raise ValueError(f"{type(inside).__name__} has no config of transformers; use fz.save(model, folder)")
    save(model, folder)
    config.save_pretrained(folder)
    if getattr(inside, "generation_config", None) is not None:
        inside.generation_config.save_pretrained(folder)


def from_pretrained(
    cls: Any,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model that ``fz.save_pretrained`` wrote: ``cls`` built from its config, factorized anew, and filled.

    ``cls`` is a model class of transformers, such as ``BertForMaskedLM``, or an auto class.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() or not (path / MANIFEST).is_file():
        raise ValueError(
            f"{folder} must hold config.json and {MANIFEST}, as fz.save_pretrained(model, folder) writes them"
        )
    from transformers import AutoConfig, GenerationConfig

    if getattr(cls, "config_class", None) is not None:
        model = cls(cls.config_class.from_pretrained(path))
    elif callable(getattr(cls, "from_config", None)):
        model = cls.from_config(AutoConfig.from_pretrained(path))
    else:
        raise ValueError(f"cls must be a model class of transformers, got {cls!r}")
    filled = load(path, model, device=device, dtype=dtype).eval()
    if (path / GENERATION).is_file():
        filled.generation_config = GenerationConfig.from_pretrained(path)  # type: ignore[assignment]
    return filled
