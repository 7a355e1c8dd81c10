from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.attention.multihead import ShrunkMultiheadAttention
from factorized.testing import error

N, L, S, E, HEADS = 2, 5, 4, 12, 3
SETTINGS: list[dict[str, Any]] = [
    {"batch_first": True},
    {},
    {"bias": False},
    {"kdim": 7, "vdim": 9, "batch_first": True},
    {"add_zero_attn": True},
    {"add_zero_attn": True, "batch_first": True, "bias": False},
]


def pair(**settings: Any) -> tuple[nn.MultiheadAttention, ShrunkMultiheadAttention]:
    """Return a dense module with biases, and what it becomes when nothing is cut off."""
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(E, HEADS, **settings).double().eval()
    with torch.no_grad():
        for parameter in dense.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter)
    small = fz.factorize_attention(deepcopy(dense), rank_scale=1)
    assert isinstance(small, ShrunkMultiheadAttention)
    return dense, small


def sequences(module: nn.MultiheadAttention, batched: bool = True) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(L, E), (S, module.kdim), (S, module.vdim)]
    result = [torch.randn(N, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
    if not batched:
        return [x[0] for x in result]
    return result if module.batch_first else [x.transpose(0, 1) for x in result]


def masks(which: str) -> dict[str, Tensor]:
    causal = torch.ones(L, S, dtype=torch.bool).triu(1)
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[1, 3:] = True
    per_head = torch.randn(N * HEADS, L, S, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    as_float = torch.zeros(N, S, dtype=torch.float64).masked_fill(padding, float("-inf"))
    return {
        "none": {},
        "boolean": {"attn_mask": causal},
        "added": {"attn_mask": per_head[0]},
        "per head": {"attn_mask": per_head},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "both added": {"attn_mask": per_head, "key_padding_mask": as_float},
    }[which]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("mask", ["none", "boolean", "added", "per head", "padding", "both", "both added"])
@pytest.mark.parametrize("need_weights", [True, False])
@torch.no_grad()
def test_it_computes_what_torchs_module_does(settings: dict[str, Any], mask: str, need_weights: bool) -> None:
    dense, small = pair(**settings)
    arguments = (*sequences(dense),)
    expected, weights = dense(*arguments, need_weights=need_weights, **masks(mask))
    actual, own_weights = small(*arguments, need_weights=need_weights, **masks(mask))
    assert error(actual, expected) < 1e-10
    assert (own_weights is None) == (weights is None)
    if weights is not None:
        assert error(own_weights, weights) < 1e-10


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("average", [True, False])
@torch.no_grad()
def test_unbatched_inputs_and_weights_by_head(settings: dict[str, Any], average: bool) -> None:
    dense, small = pair(**settings)
    for batched in (True, False):
        inputs = sequences(dense, batched)
        results = zip(
            small(*inputs, average_attn_weights=average), dense(*inputs, average_attn_weights=average), strict=True
        )
        for actual, expected in results:
            assert error(actual, expected) < 1e-10
    padding = torch.tensor([False, True, False, False])
    expected = dense(*sequences(dense, False), key_padding_mask=padding)[0]
    assert error(small(*sequences(dense, False), key_padding_mask=padding)[0], expected) < 1e-10


@torch.no_grad()
def test_the_causal_hint_is_taken_and_needs_its_mask() -> None:
    dense, small = pair(batch_first=True)
    x = sequences(dense)[0]
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for need_weights in (True, False):
        settings: dict[str, Any] = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        assert error(small(x, x, x, **settings)[0], dense(x, x, x, **settings)[0]) < 1e-10
    with pytest.raises(ValueError, match="is_causal is a hint about attn_mask"):
        small(x, x, x, is_causal=True)


@torch.no_grad()
def test_with_a_zero_to_attend_to_the_causal_hint_means_what_it_means_to_torch() -> None:
    dense, small = pair(batch_first=True, add_zero_attn=True)
    x = sequences(dense)[0]
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    for need_weights in (True, False):
        settings: dict[str, Any] = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights}
        assert error(small(x, x, x, **settings)[0], dense(x, x, x, **settings)[0]) < 1e-10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(L, S, dtype=torch.uint8)}, "attn_mask must be bool .* got uint8"),
        ({"key_padding_mask": torch.ones(N, S, dtype=torch.long)}, "key_padding_mask must be bool .* give mask == 0"),
        ({"attn_mask": torch.zeros(1, S)}, r"attn_mask must be \(5, 4\) or \(6, 5, 4\), got \(1, 4\)"),
        ({"attn_mask": torch.zeros(HEADS, L, S)}, r"attn_mask must be .* got \(3, 5, 4\)"),
        ({"attn_mask": torch.zeros(N, HEADS, L, S)}, r"attn_mask must be .* got \(2, 3, 5, 4\)"),
        ({"key_padding_mask": torch.zeros(1, S)}, r"key_padding_mask must be \(2, 4\), got \(1, 4\)"),
        ({"query": torch.zeros(L, E)}, "three dimensions each, or two without a batch, got 2, 3 and 3"),
        (
            {"query": torch.zeros(1, N, L, E), "key": torch.zeros(1, N, S, E), "value": torch.zeros(1, N, S, E)},
            "got 4, 4",
        ),
        ({"key": torch.zeros(1, S, E), "value": torch.zeros(1, S, E)}, "must be of one batch"),
        ({"value": torch.zeros(N, 1, E)}, "key and value of one length"),
    ],
)
@pytest.mark.parametrize("need_weights", [True, False])
def test_what_torch_refuses_is_not_broadcast(arguments: dict[str, Any], message: str, need_weights: bool) -> None:
    dense = nn.MultiheadAttention(E, HEADS, batch_first=True)
    small = fz.factorize_attention(deepcopy(dense), rank_scale=1)
    given = {"query": torch.zeros(N, L, E), "key": torch.zeros(N, S, E), "value": torch.zeros(N, S, E), **arguments}
    with pytest.raises((RuntimeError, AssertionError)):
        dense(**given, need_weights=need_weights)
    with pytest.raises(ValueError, match=message):
        small(**given, need_weights=need_weights)


def test_dropout_falls_on_the_attention_weights_in_training_only() -> None:
    module = ShrunkMultiheadAttention(E, HEADS, 2, 2, dropout=0.5, batch_first=True)
    x = torch.randn(N, L, E)
    for need_weights in (True, False):
        module.train()
        assert not torch.equal(*(module(x, x, x, need_weights=need_weights)[0] for _ in range(2)))
        module.eval()
        assert torch.equal(*(module(x, x, x, need_weights=need_weights)[0] for _ in range(2)))


def test_its_gradients_are_those_of_torchs_module() -> None:
    dense, small = pair(batch_first=True)
    x, y = (sequences(dense)[0].requires_grad_() for _ in range(2))
    (dense(x, x, x, need_weights=False)[0].square().sum() + 0).backward()
    small(y, y, y, need_weights=False)[0].square().sum().backward()
    assert error(y.grad, x.grad) < 1e-10
    assert all(parameter.grad is not None for parameter in small.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("need_weights", [True, False])
def test_it_compiles_whole_and_exports(need_weights: bool) -> None:
    torch._dynamo.reset()
    module = ShrunkMultiheadAttention(E, HEADS, 2, 3, batch_first=True, dtype=torch.float64).eval()
    x = torch.randn(N, L, E, dtype=torch.float64)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[0, 4] = True
    expected = module(x, x, x, padding, need_weights)[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert error(compiled(x, x, x, padding, need_weights)[0], expected) < 1e-12
    program = torch.export.export(module, (x, x, x, padding, need_weights)).module()
    assert error(program(x, x, x, padding, need_weights)[0], expected) < 1e-12


def test_copies_pickles_and_states_keep_it_as_it_is() -> None:
    module = ShrunkMultiheadAttention(E, HEADS, 2, 3, kdim=7, batch_first=True)
    inputs = (torch.randn(N, L, E), torch.randn(N, S, 7), torch.randn(N, S, E))
    for copy in (deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(copy) == repr(module)
        assert error(copy(*inputs)[0], module(*inputs)[0]) == 0
    fresh = ShrunkMultiheadAttention(E, HEADS, 2, 3, kdim=7, batch_first=True)
    assert sorted(fresh.state_dict()) == sorted(
        f"{name}.{part}" for name in ("q_proj", "k_proj", "v_proj", "out_proj") for part in ("weight", "bias")
    )
    fresh.load_state_dict(module.state_dict())
    assert error(fresh(*inputs)[0], module(*inputs)[0]) == 0
    assert "qk=2, ov=3 of 4" in repr(module)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((12, 5, 2, 2), "num_heads must divide"),
        ((12, 0, 2, 2), "num_heads must be"),
        ((12, 3, 0, 2), "qk_size must be"),
        ((12, 3, 2, 0.5), "ov_size must be"),
    ],
)
def test_wrong_sizes_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShrunkMultiheadAttention(*arguments)


def padded_encoder() -> tuple[nn.TransformerEncoder, Tensor, Tensor]:
    """Return torch's encoder, and a batch for it with positions that are padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS + 1, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(N, L, E, dtype=torch.float64)
    padding = torch.zeros(N, L, dtype=torch.bool)
    padding[1, 3:] = True
    return encoder, x, padding


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("grad", [False, True])
def test_torchs_encoder_runs_with_it_on_every_path(grad: bool) -> None:
    encoder, x, padding = padded_encoder()
    expected = encoder.train()(x, src_key_padding_mask=padding)
    encoder.eval()
    fz.factorize_attention(encoder, rank_scale=1)
    with torch.set_grad_enabled(grad):
        actual = encoder(x, src_key_padding_mask=padding)
    assert error(actual[~padding], expected[~padding]) < 1e-10


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@torch.no_grad()
def test_an_encoder_may_keep_its_first_attention_and_gets_its_fast_path_back_when_composed() -> None:
    encoder, x, padding = padded_encoder()
    plan = fz.plan(encoder, rank=2, attention="heads", include=["layers.1.self_attn"])
    small = fz.factorize(deepcopy(encoder), plan)
    composed = fz.compose(small)
    assert (small.use_nested_tensor, composed.use_nested_tensor) == (False, True)
    assert composed.__dict__.keys() == encoder.__dict__.keys()
    actual, expected = (one(x, src_key_padding_mask=padding) for one in (small, composed))
    assert error(actual[~padding], expected[~padding]) < 1e-10
    assert expected[padding].abs().max() == 0 < actual[padding].abs().max()  # as torch's fast path leaves them


def test_torchs_decoder_runs_with_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    decoder = nn.TransformerDecoder(layer, 1).eval()
    x, memory = torch.randn(N, L, E, dtype=torch.float64), torch.randn(N, S, E, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    expected = decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)
    fz.factorize_attention(decoder, rank_scale=1)
    assert error(decoder(x, memory, tgt_mask=mask, tgt_is_causal=True), expected) < 1e-10


@torch.no_grad()
def test_what_is_shrunk_can_be_rebalanced_with_a_zero_to_attend_to() -> None:
    dense, _ = pair(add_zero_attn=True, batch_first=True)
    small = fz.factorize_attention(dense, rank_scale=0.5)
    inputs = sequences(small)
    expected = small(*inputs)[0]
    small.v_proj.bias += 1
    shifted = small(*inputs)[0]
    assert error(shifted, expected) > 0.01
    fz.spectral_init_attention(small)
    assert error(small(*inputs)[0], shifted) < 1e-10
