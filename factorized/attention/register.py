"""The adapter for each attention class, found without importing its library; ``fz.register_attention``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from factorized.attention.families import BERT, LLAMA, MARIAN, VIT, read_gpt2, read_multihead, read_shrunk
from factorized.attention.family import Family, UnreadableAttention, is_transposed
from factorized.attention.multihead import ShrunkMultiheadAttention
from factorized.attention.unit import AttentionUnit
from factorized.nn.model import is_inside

Adapter = Callable[[Any], AttentionUnit]  # of a module of its class

# Classes of transformers, by name, so that it is not imported.
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
# The class of torch, and its shrunk version.
TORCH: dict[type[nn.Module], Adapter] = {
    nn.MultiheadAttention: read_multihead,
    ShrunkMultiheadAttention: read_shrunk,
}
_registered: dict[type[nn.Module], Adapter] = {}  # by calls of ``register_attention`` alone

CALLED = ("attention", "attn", "mha")  # words in the names of attention classes
FIVE_LINES = """fz.register_attention(
    {name},
    query="...", key="...", value="...", output="...",  # of its linears: {linears}
    heads="...",  # its attribute with the number of heads
)"""


@dataclass(frozen=True)
class Found:
    """An attention module of a model: read, or with the reason why it could not be."""

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
    """Tell the library where an attention class of yours keeps its matrices; this holds for subclasses too.

    All arguments but the last are dotted names inside the module. Calling it again for a class replaces the
    registration. Before heads of the class are first cut, one module is run with and without its heads cut, on noise or
    on the ``example_input`` of ``fz.plan``; a registration that does not fit raises.

    Args:
        cls: the attention class.
        query: its ``nn.Linear``; the same name for ``query``, ``key`` and ``value`` means one layer that packs
            them: all queries first, then all keys, then all values, not head by head.
        key: likewise.
        value: likewise.
        output: the linear after the heads.
        heads: the attribute with the number of query heads.
        kv_heads: the attribute with the number of key and value heads, where those are shared.
        head_size: the attribute that ``forward`` splits heads by. Given with ``scale``, shrunk heads are narrower
            everywhere; otherwise they are padded between the projections, which shrinks only the weights.
        scale: the attribute with the softmax scale; leave it out where ``forward`` computes the scale itself.
        rotary: whether queries and keys are rotated by position, or changed in another way (such as a norm), between
            the two matrices, so that QK is not a single form.

    Raises:
        ValueError: ``cls`` is not a subclass of ``nn.Module``, or another argument is not a dotted name.

    Examples:
        >>> class Attention(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.heads = 2
        ...         self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        >>> fz.register_attention(Attention, query="q", key="k", value="v", output="o", heads="heads")
        >>> [form.name for form in fz.forms(nn.Sequential(Attention()))]
        ['0.qk', '0.ov']
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"cls must be a subclass of nn.Module, got {cls!r}")
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
    """Return whether the library has an adapter for exactly this class, neither registered nor for a parent class."""
    return type(module) not in _registered and _known_adapter(type(module)) is not None


def _known_adapter(cls: type) -> Adapter | None:
    return TORCH.get(cls) or KNOWN.get(f"{cls.__module__}.{cls.__qualname__}")


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a class is named like attention and holds projections, and no module inside is the attention."""
    if not any(word in type(module).__name__.lower() for word in CALLED):
        return False
    linears, inside = len(_linears(module)), [child for child in module.modules() if child is not module]
    if linears < 2 or any(adapter_of(child) is not None for child in inside):
        return False
    return all(_lacks_output(child, linears) for child in inside if looks_like_attention(child))


def _lacks_output(inner: nn.Module, linears: int) -> bool:
    """Return whether ``inner``, also named like attention, leaves the output to the module around it, as in BERT.

    The outer module then has one more linear. Two linears (packed inputs and an output) and four (three inputs and an
    output) are complete.
    """
    count = len(_linears(inner))
    return count not in (2, 4) and linears == count + 1


def _linears(module: nn.Module) -> list[str]:
    """Return the dotted names of the linear layers inside ``module``."""
    children = module.named_modules()
    return [name for name, child in children if name and (isinstance(child, nn.Linear) or is_transposed(child))]


def read_attention(name: str, module: nn.Module) -> Found | None:
    """Return ``module`` as an attention module, or None if it has no adapter."""
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
        if any(is_inside(name, outer) for outer in inside):
            continue
        found = read_attention(name, module)
        if found is None and looks_like_attention(module):
            cls = type(module)
            call = FIVE_LINES.format(name=cls.__name__, linears=", ".join(_linears(module)))
            found = Found(
                name,
                module,
                None,
                f"{cls.__qualname__} of {cls.__module__} is not registered; register it with\n{call}",
            )
        if found is not None:
            inside.append(name)
            yield found
