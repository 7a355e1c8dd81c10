"""transformers: attention without the masks that compiled models build and do not need."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import torch

from factorized.nn.running import evaluation_mode

SKIPPING = "sdpa_skipping_masks"  # attention of transformers, by the names that its models look up
ASKING = "sdpa_asking_for_masks"


def skip_masks(model: Any, example: Mapping[str, Any]) -> bool:
    """Make a compiled transformers model skip attention masks that it does not need; return whether it does.

    PyTorch's fastest attention takes no mask, so transformers makes none for sequences without padding: "causal" is a
    flag. To find this out, it reads values of tensors. Compiled code cannot do that, and makes a mask after all: for
    any model with PyTorch 2.11 or transformers 5.17; with later versions for models called without ``use_cache``, whose
    rows might hold several texts, by their position ids.

    After this call, compiled calls skip such masks. They must not get position ids that start again within a row.
    Padding, sliding windows and chunks are masked as before. Uncompiled calls do not change, nor do ``generate`` and
    saved files. ``model.set_attn_implementation("sdpa")`` undoes it. The model gets a config of its own, since another
    model may have been built from the same.

    Args:
        model: a model of transformers whose attention is ``"sdpa"``, its default. With another, nothing changes, nor
            where the model's code tests for that name, as that of MiniMax-M3 does to choose what a token attends to.
        example: inputs of the model by name, on its device. The model runs on them once, without gradients, to see
            whether it needs a mask that would be skipped; if so, nothing changes.

    Raises:
        ValueError: no part of the model is one of transformers.

    Examples:
        >>> import transformers
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, **sizes))
        >>> fz.integrations.skip_masks(model, {"input_ids": torch.randint(100, (1, 16))})
        True
        >>> compiled = torch.compile(model)
    """
    from transformers.masking_utils import sdpa_mask

    needed: list[bool] = []  # of the masks that would be skipped

    def ask(**arguments: Any) -> Any:
        mask = sdpa_mask(**arguments)
        if _is_plain(**arguments):
            needed.append(mask is not None)
        return mask

    _register(ASKING, ask)
    _register_skipping()
    configs = {module: module.config for module in model.modules() if hasattr(module, "config")}
    ways = [getattr(config, "_attn_implementation", None) for config in configs.values()]
    if not any(ways):
        raise ValueError(f"model must be one of transformers, got {type(model).__name__}")
    if any(_tests_for_sdpa(module) for module in model.modules()):
        return False
    found = zip(configs.values(), ways, strict=True)
    changed = {id(config): (config, way) for config, way in found if way in ("sdpa", SKIPPING)}
    every = [config for config, _ in changed.values()]
    try:
        _choose(every, ASKING)
        with evaluation_mode(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(**example)
    finally:
        _choose(every, "sdpa")
    if not needed or any(needed):
        return False
    own = [config for config, way in changed.values() if way == SKIPPING]  # since an earlier call
    _choose([*own, *_own_copies(configs, [config for config, way in changed.values() if way == "sdpa"])], SKIPPING)
    return True


def _own_copies(configs: Mapping[Any, Any], chosen: list[Any]) -> list[Any]:
    """Give modules copies of the chosen ones of their configs, which other models may have too; return these."""
    copies: dict[int, Any] = {}
    own = [deepcopy(config, copies) for config in chosen]
    for module, config in configs.items():
        if id(config) in copies:
            module.config = copies[id(config)]
    return own


@cache  # another function under the name would make compiled models compile again
def _register_skipping() -> None:
    from transformers.masking_utils import sdpa_mask

    def skip(**arguments: Any) -> Any:
        return None if torch.compiler.is_compiling() and _is_plain(**arguments) else sdpa_mask(**arguments)

    _register(SKIPPING, skip)


def _register(name: str, make_mask: Callable[..., Any]) -> None:
    """Give a name to transformers' attention by PyTorch's function, with masks made by ``make_mask``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(name, sdpa_attention_forward)
    AttentionMaskInterface.register(name, make_mask)


def _is_plain(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> bool:
    """Return whether a mask, by what transformers makes it from, says nothing but "causal", or nothing at all."""
    whole = q_length == kv_length or allow_is_bidirectional_skip
    widened = use_vmap or mask_function.__name__ == "or_mask"  # by transformers' or_masks: images or a prefix see ahead
    return whole and attention_mask is None and not widened and (local_size is None or kv_length < local_size)


def _tests_for_sdpa(module: Any) -> bool:
    """Return whether the forward of a module has "sdpa" among its constants; it would not know other names."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    constants = () if code is None else code.co_consts
    return any("sdpa" in (found if isinstance(found, (tuple, frozenset)) else (found,)) for found in constants)


def _choose(configs: list[Any], name: str) -> None:
    """Set how the models with these configs attend, without changing the configs inside them."""
    for config in configs:
        config._attn_implementation_internal = name
