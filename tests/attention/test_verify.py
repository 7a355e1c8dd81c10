from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.attention.register import _registered
from tests.attention.attention_zoo import SIZES, tokens

HEADS, SIZE, WIDTH = 4, 6, 20
NAMES = {"query": "q", "key": "k", "value": "v", "output": "o", "heads": "heads"}


def turned(x: Tensor) -> Tensor:  # (batch, heads, length, size)
    angles = torch.arange(x.shape[-2])[:, None] / 3.0 ** torch.arange(x.shape[-1] // 2)
    left, right = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attends(nn.Module):
    """Attention of one sequence to itself."""

    half = HEADS // 2

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim, self.scale = HEADS, SIZE, SIZE**-0.5
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.o = nn.Linear(HEADS * SIZE, WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return x

    def attend(self, x: Tensor, scale: float | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.between(q), self.between(k), v, scale=scale)
        return self.o(out.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)


class Turns(Attends):
    def between(self, x: Tensor) -> Tensor:
        return turned(x)


class Norms(Attends):
    def between(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


class Scales(Attends):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, self.scale)


class NeedsAngles(Turns):
    """Attention that cannot be called with sequences alone."""

    def forward(self, x: Tensor, angles: dict[str, bool]) -> Tensor:
        return self.attend(x, None) if angles["on"] else x


class Host(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, {"on": True})


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "plan": lambda model: fz.plan(model, rank=2, attention="heads"),
    "shrink": fz.factorize_attention,
    "rebalance": fz.spectral_init_attention,
}


@pytest.fixture(autouse=True)
def _only_registered_here() -> Iterator[None]:
    before = dict(_registered)
    yield
    _registered.clear()
    _registered.update(before)


@pytest.mark.parametrize(
    ("cls", "said", "look"),
    [
        (Turns, {}, "rotary="),
        (Norms, {}, "rotary="),
        (Attends, {"key": "v", "value": "k"}, "query=, key=, value= and output="),
        (Attends, {"heads": "half"}, "heads="),
        (Turns, {"head_size": "head_dim", "scale": "scale"}, "rotary="),
        (Attends, {"head_size": "head_dim", "scale": "scale"}, "leave scale= out"),
    ],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_registration_that_does_not_fit_is_refused_with_what_to_look_at(
    cls: type[nn.Module], said: dict[str, str], look: str, call: str
) -> None:
    model = nn.Sequential(cls())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fz.register_attention(cls, **{**NAMES, **said})
    with pytest.raises(ValueError, match=rf"^0: {cls.__name__} is registered in a way .* Look at .*{look}"):
        CALLS[call](model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Attends, {}),
        (Turns, {"rotary": True}),
        (Norms, {"rotary": True}),
        (Scales, {"head_size": "head_dim", "scale": "scale"}),
    ],
)
def test_a_registration_that_fits_is_taken(cls: type[nn.Module], said: dict[str, Any], dtype: torch.dtype) -> None:
    fz.register_attention(cls, **NAMES, **said)
    (entry,) = fz.plan(nn.Sequential(cls()).to(dtype), rank=2, attention="heads").entries
    assert entry.rank == 2
    assert entry.note is None


def test_registrations_are_checked_whatever_the_default_type_and_device() -> None:
    fz.register_attention(Attends, **NAMES)
    model = nn.Sequential(Attends())
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            (entry,) = fz.plan(model, rank=2, attention="heads").entries
    finally:
        torch.set_default_dtype(torch.float32)
    assert entry.note is None


def test_a_class_that_needs_more_than_sequences_is_checked_on_the_example_input() -> None:
    model = Host(NeedsAngles())
    fz.register_attention(NeedsAngles, **NAMES)
    plan = fz.plan(model, rank=2, attention="heads")
    assert plan.entries[0].note == "its registration could not be checked; pass example_input= to check it"
    assert "could not be checked" in str(plan)
    assert "could not be checked" in plan.to_html()
    assert fz.Plan.from_dict(plan.to_dict()) == plan
    with pytest.raises(ValueError, match="Look at rotary="):
        fz.plan(model, rank=2, attention="heads", example_input=torch.zeros(1, 5, WIDTH))
    with pytest.raises(ValueError, match="Look at rotary="):
        fz.factorize_attention(model, example_input=torch.randn(1, 5, WIDTH))
    fz.register_attention(NeedsAngles, **NAMES, rotary=True)
    checked = fz.plan(model, rank=2, attention="heads", example_input=torch.randn(1, 5, WIDTH))
    assert checked.entries[0].note is None


def test_one_position_alone_shows_nothing() -> None:
    model = Host(NeedsAngles())
    fz.register_attention(NeedsAngles, **NAMES)
    plan = fz.plan(model, rank=2, attention="heads", example_input=torch.randn(1, 1, WIDTH))
    assert plan.entries[0].note is not None


def test_a_forgotten_rotary_of_a_model_of_transformers_is_found_on_its_tokens() -> None:
    from transformers import Qwen2Config, Qwen2Model

    model = Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=1, head_dim=8))
    cls = type(model.layers[0].self_attn)
    names = {name: f"{name[0]}_proj" for name in ("query", "key", "value", "output")}
    heads = {"heads": "config.num_attention_heads", "kv_heads": "config.num_key_value_heads"}
    fz.register_attention(cls, **names, **heads)
    with pytest.raises(ValueError, match="Look at rotary="):
        fz.plan(model, rank=2, attention="heads", example_input=tokens())
    fz.register_attention(cls, **names, **heads, rotary=True)
    assert fz.plan(model, rank=2, attention="heads", example_input=tokens()).attention[0].note is None


def test_a_subclass_with_a_forward_of_its_own_is_checked_like_a_registered_class() -> None:
    fz.register_attention(Attends, **NAMES)
    with pytest.raises(ValueError, match="Turns is registered in a way"):
        fz.plan(nn.Sequential(Turns()), rank=2, attention="heads")


def test_the_check_leaves_no_trace() -> None:
    fz.register_attention(Attends, **NAMES)
    model = nn.Sequential(Attends()).train()
    called: list[Any] = []
    model[0].register_forward_hook(lambda *given: called.append(given))
    before, state = dict(vars(model[0])), torch.get_rng_state()
    fz.plan(model, rank=2, attention="heads")
    assert vars(model[0]) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not called
    assert all(module.training for module in model.modules())


def test_a_module_on_the_meta_device_cannot_be_checked() -> None:
    fz.register_attention(Turns, **NAMES)
    (entry,) = fz.plan(nn.Sequential(Turns()).to("meta"), rank=2, attention="heads").entries
    assert entry.note is not None
