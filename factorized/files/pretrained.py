"""``fz.save_pretrained`` and ``fz.from_pretrained``: checkpoints of factorized transformers models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn

from factorized.files.checkpoint import check_target, load, save, writing_rank
from factorized.files.folder import MANIFEST, read_plan_of_transformers, write_plan
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model
from factorized.planning.plan import Plan
from factorized.surgery.describe import describe
from factorized.surgery.factorize import build_layers, install
from factorized.surgery.state import is_sharded, unwrapped

GENERATION = "generation_config.json"


def save_pretrained(model: nn.Module, folder: str | Path, *, allow_nonfinite: bool = False) -> None:
    """Write a factorized transformers model to ``folder``: its config, and weights and plan as ``fz.save`` does.

    For a sharded ``model`` every rank must call this, and one writes.

    Raises:
        ValueError: the model has no transformers config, or what ``fz.save`` raises; ``allow_nonfinite=True`` saves
            weights that are not finite too.
        OSError: the files could not be written.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        >>> model = fz.factorize(BertForMaskedLM(BertConfig(vocab_size=50, **sizes)), rank=4)
        >>> fz.save_pretrained(model, "saved")
    """
    check_model(model)
    inside: Any = unwrapped(model)
    config = getattr(inside, "config", None)
    if config is None or not callable(getattr(config, "save_pretrained", None)):
        raise ValueError(f"{type(inside).__name__} has no transformers config; use fz.save(model, folder)")
    save(model, folder, allow_nonfinite=allow_nonfinite)
    if is_sharded(model) and dist.get_rank() != writing_rank(folder, ()):
        return
    config = deepcopy(config)  # as transformers writes it, with the type of the weights and the class
    name = type(inside).__name__.removeprefix("FSDP")  # fully_shard makes a subclass of that name
    config.dtype, config.architectures = _widest_type(inside), [name]
    config.save_pretrained(folder)
    if getattr(inside, "generation_config", None) is not None:
        inside.generation_config.save_pretrained(folder)


def save_plan(model: nn.Module, folder: str | Path) -> None:
    """Write ``plan.json`` to a ``folder`` where transformers saved ``model``, so that ``fz.from_pretrained`` opens it.

    ``config.json``, ``model.safetensors`` and ``plan.json`` are then all that a hub repository needs.

    Raises:
        ValueError: the model has no factorized layer.
        OSError: the file could not be written.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        >>> model = fz.factorize(BertForMaskedLM(BertConfig(vocab_size=50, **sizes)), rank=4)
        >>> model.save_pretrained("saved")
        >>> fz.save_plan(model, "saved")
    """
    check_model(model)
    write_plan(Path(folder), describe(unwrapped(model)))


@overload
def from_pretrained(
    cls: type[Model], folder: str | Path, *, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...
) -> Model: ...


@overload  # an auto class
def from_pretrained(
    cls: type[object], folder: str | Path, *, device: torch.device | str | None = ..., dtype: torch.dtype | None = ...
) -> nn.Module: ...


def from_pretrained(
    cls: type[Any],
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model that ``fz.save_pretrained`` wrote to ``folder``: made from its config, factorized, and filled.

    No code from the folder is run. Folders that transformers wrote can be opened too, if ``fz.save_plan`` or
    ``FactorizedTrainerMixin`` added the plan.

    Args:
        cls: a model class of transformers, such as ``BertForMaskedLM``, or an auto class.
        folder: holds ``config.json``, ``plan.json`` and the weights.
        device: where the model is put; by default the CPU.
        dtype: the type of the weights; by default the one they were saved in.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: ``cls`` is not a model class of transformers, a file is missing or damaged, or the weights do not
            fit the plan.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        >>> fz.save_pretrained(fz.factorize(BertForMaskedLM(BertConfig(vocab_size=50, **sizes)), rank=4), "saved")
        >>> model = fz.from_pretrained(BertForMaskedLM, "saved")
    """
    is_model = getattr(cls, "config_class", None) is not None
    if isinstance(cls, nn.Module):
        raise ValueError(f"cls must be a model class of transformers, got a model: pass {type(cls).__name__} itself")
    if not (is_model or callable(getattr(cls, "from_config", None))):
        raise ValueError(f"cls must be a model class of transformers, got {cls!r}; the folder comes after it")
    check_target(device, dtype)
    path = Path(folder)
    _check_files(path, cls)
    from transformers import AutoConfig, GenerationConfig

    if is_model:
        config = cls.config_class.from_pretrained(path)
    else:
        refuse_own_code(path, f"import the model's class and pass it as cls instead of {cls.__name__}")
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    dtype = dtype or config.dtype or torch.get_default_dtype()
    plan = read_plan_of_transformers(path)
    if plan is not None:
        return _loaded_by_transformers(cls, path, plan, config, dtype).to(device).eval()
    # Built in that type, not cast to it: rotary frequencies and the like stay in float32, as in transformers.
    with _default_type(dtype):
        model = cls(config) if is_model else cls.from_config(config, dtype=dtype, trust_remote_code=False)
    filled: Any = load(path, model, device=device).eval()
    if (path / GENERATION).is_file():
        filled.generation_config = GenerationConfig.from_pretrained(path)
    return filled


def _check_files(path: Path, cls: type[Any]) -> None:
    missing = [name for name in ("config.json", MANIFEST) if not (path / name).is_file()]
    if missing == [MANIFEST]:
        raise ValueError(
            f"{path} holds no {MANIFEST}. If transformers saved a factorized model there, make a model with the same "
            f"factorized layers and call fz.save_plan(model, folder); a dense one is opened by "
            f"{cls.__name__}.from_pretrained"
        )
    if missing:
        raise ValueError(f"{path} must hold config.json and {MANIFEST}; fz.save_pretrained(model, folder) writes both")


def _loaded_by_transformers(cls: Any, path: Path, plan: Plan, config: Any, dtype: torch.dtype) -> nn.Module:
    """Load with transformers, into a class that factorizes itself when it is built."""
    if getattr(cls, "config_class", None) is None:
        with torch.device("meta"):
            cls = type(cls.from_config(config, dtype=dtype, trust_remote_code=False))
    says_untied = getattr(config, "tie_word_embeddings", None) is False and _plans_tied_embeddings(cls, plan, config)
    if says_untied:  # but transformers wrote them once, and has to fill both
        config.tie_word_embeddings = True

    def build(self: Any, *arguments: Any, **keywords: Any) -> None:
        cls.__init__(self, *arguments, **keywords)
        install(self, plan, build_layers(self, plan, init=None))

    # transformers looks many things up by the name of a class and of its module
    own = {"__init__": build, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    built: Any = type(cls.__name__, (cls,), own)
    model, info = built.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they raise below
        output_loading_info=True,
    )
    wrong = [
        f"{what.replace('_', ' ')}: {', '.join(sorted(map(str, found))[:3])}" for what, found in info.items() if found
    ]
    if wrong:
        raise ValueError(f"the weights in {path} do not fit its {MANIFEST}: {'; '.join(wrong)}. Save the model again")
    model.__class__ = cls
    if says_untied:
        model.config.tie_word_embeddings = False
    return model


def _plans_tied_embeddings(cls: Any, plan: Plan, config: Any) -> bool:
    """Return whether input and output embeddings share their factors.

    Their composed weights are two tensors, so that peft, after a merge, says in the config that they are not tied.
    """
    if not any(entry.tied_to for entry in plan.layers):
        return False
    with torch.device("meta"):
        dense = cls(config)
    model: Any = install(dense, plan, build_layers(dense, plan, init=None))
    try:
        first, last = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    both = isinstance(first, FactorizedLayer) and isinstance(last, FactorizedLayer)
    return both and first.factors[0] is last.factors[0]


def refuse_own_code(folder: Path, remedy: str) -> None:
    """Raise if config.json in ``folder`` is damaged, or names Python code that an auto class would run."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: it holds no settings, but a {type(config).__name__}")
    if config.get("auto_map"):
        raise ValueError(f"{path} names code in its folder (auto_map), which is never run; {remedy}")


def _widest_type(model: nn.Module) -> torch.dtype:
    """Return the narrowest type that holds every parameter of ``model`` exactly."""
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
