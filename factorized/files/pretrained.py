"""``fz.save_pretrained`` and ``fz.from_pretrained``: checkpoints of transformers models that are factorized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.files.checkpoint import load, save
from factorized.files.folder import MANIFEST, read_plan_of_transformers, write_plan
from factorized.nn.model import check_model
from factorized.planning.plan import Plan
from factorized.surgery.describe import describe
from factorized.surgery.factorize import build_layers, install
from factorized.surgery.state import unwrapped

GENERATION = "generation_config.json"


def save_pretrained(model: nn.Module, folder: str | Path, *, allow_nonfinite: bool = False) -> None:
    """Write a factorized transformers model: its config files as transformers does, weights and plan as ``fz.save``.

    Weights that are not finite are refused unless ``allow_nonfinite``.
    """
    check_model(model)
    inside: Any = unwrapped(model)
    config = getattr(inside, "config", None)
    if config is None or not callable(getattr(config, "save_pretrained", None)):
        raise ValueError(f"{type(inside).__name__} has no config of transformers; use fz.save(model, folder)")
    save(model, folder, allow_nonfinite=allow_nonfinite)
    config = deepcopy(config)  # as transformers writes it, which also says what the weights are and whose
    config.dtype, config.architectures = _widest_type(inside), [type(inside).__name__]
    config.save_pretrained(folder)
    if getattr(inside, "generation_config", None) is not None:
        inside.generation_config.save_pretrained(folder)


def save_plan(model: nn.Module, folder: str | Path) -> None:
    """Write ``plan.json`` into a folder where transformers saved ``model``, so that ``fz.from_pretrained`` opens it.

    ``config.json``, ``model.safetensors`` and ``plan.json`` are then all that a repository on a hub needs.
    """
    check_model(model)
    write_plan(Path(folder), describe(unwrapped(model)))


def from_pretrained(
    cls: Any,
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model that ``fz.save_pretrained`` wrote: ``cls`` built from its config, factorized anew, and filled.

    ``cls`` is a model class of transformers, such as ``BertForMaskedLM``, or an auto class. The model is of the type it
    was saved in unless ``dtype`` says otherwise, and in evaluation mode. No code of the folder is run. Folders that
    transformers wrote are opened too, where ``fz.save_plan`` or ``FactorizedTrainerMixin`` added the plan.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() or not (path / MANIFEST).is_file():
        raise ValueError(
            f"{folder} must hold config.json and {MANIFEST}, as fz.save_pretrained(model, folder) writes them"
        )
    from transformers import AutoConfig, GenerationConfig

    is_model = getattr(cls, "config_class", None) is not None
    if isinstance(cls, nn.Module):
        raise ValueError(f"cls must be a model class of transformers, got a model: give {type(cls).__name__} itself")
    if not (is_model or callable(getattr(cls, "from_config", None))):
        raise ValueError(f"cls must be a model class of transformers, got {cls!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r}")
    if is_model:
        config = cls.config_class.from_pretrained(path)
    else:
        _refuse_own_code(path / "config.json", cls)
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    dtype = dtype or config.dtype or torch.get_default_dtype()
    plan = read_plan_of_transformers(path)
    if plan is not None:
        return _loaded_by_transformers(cls, path, plan, config, dtype).to(device).eval()
    # Built in that type and not cast to it: rotary frequencies and the like stay in float32, as transformers has them.
    with _default_type(dtype):
        model = cls(config) if is_model else cls.from_config(config, dtype=dtype, trust_remote_code=False)
    filled = load(path, model, device=device).eval()
    if (path / GENERATION).is_file():
        filled.generation_config = GenerationConfig.from_pretrained(path)  # type: ignore[assignment]
    return filled


def _loaded_by_transformers(cls: Any, path: Path, plan: Plan, config: Any, dtype: torch.dtype) -> nn.Module:
    """Let transformers fill a model of a class that is factorized as soon as it is built."""
    if getattr(cls, "config_class", None) is None:
        with torch.device("meta"):
            cls = type(cls.from_config(config, dtype=dtype, trust_remote_code=False))

    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        cls.__init__(self, *arguments, **keywords)
        install(self, plan, build_layers(self, plan, init=None))

    # transformers finds much by the name of a class and of its module
    own = {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    built = type(cls.__name__, (cls,), own)
    model, info = built.from_pretrained(  # type: ignore[attr-defined]
        path,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are refused below
        output_loading_info=True,
    )
    wrong = [
        f"{what.replace('_', ' ')}: {', '.join(sorted(map(str, found))[:3])}" for what, found in info.items() if found
    ]
    if wrong:
        raise ValueError(f"the weights in {path} do not fit its {MANIFEST}: {'; '.join(wrong)}. Save the model again")
    model.__class__ = cls
    return model


def _refuse_own_code(path: Path, cls: Any) -> None:
    """Raise where a config names Python code that an auto class would have to run."""
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if isinstance(config, dict) and config.get("auto_map"):
        raise ValueError(
            f"{path} names code of its own (auto_map), which is never run; import the model's class and give it as cls "
            f"instead of {cls.__name__}"
        )


def _widest_type(model: nn.Module) -> torch.dtype:
    """Return the type that holds every parameter of ``model`` as it is."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return reduce(torch.promote_types, found)


@contextmanager
def _default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
