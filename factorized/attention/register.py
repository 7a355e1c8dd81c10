"""Which adapter reads which class, without importing the library that defines it; ``fz.register_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from factorized.attention.families import BERT, LLAMA, MARIAN, VIT, read_gpt2, read_multihead, read_shrunk
from factorized.attention.family import Family, UnreadableAttention, is_transposed
from factorized.attention.multihead import ShrunkMultiheadAttention
from factorized.attention.unit import AttentionUnit

Adapter = Callable[[Any], AttentionUnit]  # of a module of its class

# Of transformers, by name, so that it is not imported.
KNOWN: dict[str, Adapter] = {
    "transformers.models.bert.modeling_bert.BertAttention": BERT,
    "transformers.models.roberta.modeling_roberta.RobertaAttention": BERT,
    "transformers.models.marian.modeling_marian.MarianAttention": MARIAN,
    "transformers.models.bart.modeling_bart.BartAttention": MARIAN,
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": read_gpt2,
    "transformers.models.llama.modeling_llama.LlamaAttention": LLAMA,
    "transformers.models.mistral.modeling_mistral.MistralAttention": LLAMA,
    "transformers.models.vit.modeling_vit.ViTAttention": VIT,
}
# Of torch, and what its class becomes.
TORCH: dict[type[nn.Module], Adapter] = {
    nn.MultiheadAttention: read_multihead,
    ShrunkMultiheadAttention: read_shrunk,
}
_registered: dict[type[nn.Module], Adapter] = {}  # by calls of ``register_attention`` alone

CALLED = ("attention", "attn", "mha")  # words in the names of classes that are attention
FIVE_LINES = """fz.register_attention(
    {name},
    query="...", key="...", value="...", output="...",  # of its linears: {linears}
    heads="...",  # its attribute with the number of heads
)"""


@dataclass(frozen=True)
class Found:
    """An attention module of a model: read, or with the reason why it cannot be."""

    name: str
    module: nn.Module
    unit: AttentionUnit | None
    reason: str | None = None


def register_attention(
    cls: type[nn.Module],
    *,
    query: str,
    key: str,
    value: str,
    output: str,
    heads: str,
    kv_heads: str | None = None,
    head_size: str | None = None,
    scale: str | None = None,
    rotary: bool = False,
) -> None:
    """Tell the library where an attention class of yours keeps its matrices; subclasses are read alike.

    All arguments but the last are dotted names inside the module. Calling it again for a class replaces what was said.
    Before heads of the class are first cut, one module is run with and without its heads cut, on noise or on the
    ``example_input`` of ``fz.plan``: a registration that does not fit is refused.

    Args:
        cls: the attention class.
        query: its ``nn.Linear``; the same name for ``query``, ``key`` and ``value`` means one that packs them: all
            queries first, then all keys, then all values, and not head by head.
        key: likewise.
        value: likewise.
        output: the linear after the heads.
        heads: the attribute with the number of query heads.
        kv_heads: the attribute with the number of key and value heads, where those are shared.
        head_size: the attribute that ``forward`` splits heads by. Given with ``scale``, shrunk heads are narrower
            everywhere; otherwise they are padded between the projections, which shrinks the weights alone.
        scale: the attribute with the softmax scale; leave it out where ``forward`` computes the scale itself.
        rotary: whether queries and keys are turned by their positions, or changed in another way between the two
            matrices (a norm), so that QK is no single form.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"cls must be a class of nn.Module, got {cls!r}")
    names = {"query": query, "key": key, "value": value, "output": output, "heads": heads}
    optional = {"kv_heads": kv_heads, "head_size": head_size, "scale": scale}
    for argument, name in {**names, **optional}.items():
        if not (isinstance(name, str) and name) and not (argument in optional and name is None):
            raise ValueError(f"{argument} must be the dotted name of an attribute of {cls.__name__}, got {name!r}")
    _registered[cls] = Family(query, key, value, output, heads, kv_heads, head_size, scale, rotary=rotary)


def adapter_of(module: nn.Module) -> Adapter | None:
    """Return the adapter for the class of ``module``, or for the nearest of its parents that has one."""
    adapters = (_registered.get(cls) or _known_adapter(cls) for cls in type(module).__mro__)
    return next(filter(None, adapters), None)


def is_known(module: nn.Module) -> bool:
    """Return whether the library itself has the adapter of this very class: not by registration, not of a parent."""
    return type(module) not in _registered and _known_adapter(type(module)) is not None


def _known_adapter(cls: type) -> Adapter | None:
    return TORCH.get(cls) or KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a class is called attention and holds projections, and nothing inside it is attention instead."""
    if not any(word in type(module).__name__.lower() for word in CALLED):
        return False
    linears, inside = len(_linears(module)), [child for child in module.modules() if child is not module]
    if linears < 2 or any(adapter_of(child) is not None for child in inside):
        return False
    return all(_lacks_output(child, linears) for child in inside if looks_like_attention(child))


def _lacks_output(inner: nn.Module, linears: int) -> bool:
    """Return whether ``inner``, called attention too, leaves the output to the module around it, as BERT's does.

    The module around it then has one linear more. Two and four linears are whole by themselves: packed inputs and an
    output, or three and an output.
    """
    count = len(_linears(inner))
    return count not in (2, 4) and linears == count + 1


def _linears(module: nn.Module) -> list[str]:
    """Return the dotted names of the linear layers inside ``module``."""
    children = module.named_modules()
    return [name for name, child in children if name and (isinstance(child, nn.Linear) or is_transposed(child))]


def read_attention(name: str, module: nn.Module) -> Found | None:
    """Return ``module`` as an attention module, or None where it is none that has an adapter."""
    adapter = adapter_of(module)
    if adapter is None:
        return None
    try:
        return Found(name, module, adapter(module))
    except UnreadableAttention as reason:
        return Found(name, module, None, str(reason))


def find_attention(model: nn.Module) -> Iterator[Found]:
    """Yield every attention module of ``model`` once: those with an adapter, and those that seem to need one."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") or outer == "" for outer in inside):
            continue
        found = read_attention(name, module)
        if found is None and looks_like_attention(module):
            cls = type(module)
            call = FIVE_LINES.format(name=cls.__name__, linears=", ".join(_linears(module)))
            found = Found(
                name, module, None, f"nobody registered {cls.__qualname__} of {cls.__module__}; do so with\n{call}"
            )
        if found is not None:
            inside.append(name)
            yield found
