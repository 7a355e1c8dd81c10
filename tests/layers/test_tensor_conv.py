from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from factorized import TensorizedConv2d
from tests.composed_contract import Case, error, gradients
from tests.tensor_contract import TensorContract

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's own

# A setting: channels in and out, kernel size, spatial extents, and what else torch's layer is given.
SETTINGS: dict[str, tuple[tuple[int, int], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "plain": ((4, 6), (3, 3), (6, 7), {"padding": 1}),
    "unequal": ((4, 6), (3, 2), (9, 8), {"stride": (2, 1), "padding": (2, 1), "dilation": (1, 2)}),
    "same": ((4, 6), (2, 4), (6, 7), {"padding": "same"}),
    "circular": ((4, 6), (3, 4), (6, 7), {"padding": "same", "padding_mode": "circular", "dilation": (2, 1)}),
    "valid": ((4, 6), (3, 2), (6, 7), {"padding": "valid", "stride": 2, "bias": False}),
    "reflect": ((4, 6), (3, 5), (6, 7), {"padding": (1, 2), "padding_mode": "reflect"}),
    "groups": ((6, 4), (3, 2), (6, 7), {"groups": 2, "padding": 1, "padding_mode": "replicate"}),
    "pointwise": ((4, 6), (1, 1), (6, 7), {"stride": (2, 1)}),
}
KINDS: dict[str, dict[str, Any]] = {
    "train": {"method": "tensor_train"},
    "tucker": {"method": "tucker"},
    "separable-train": {"method": "tensor_train", "separable": True},
    "separable-tucker": {"method": "tucker", "separable": True},
}
NOT_SEPARABLE = {"groups", "pointwise"}
TURNS = ("tucker", "train") * 4
THOROUGH = {"plain-train-two_convs", "plain-tucker-three_convs", "unequal-separable-tucker-one_conv"}
INDUCTOR = {"plain-tucker-three_convs"}


def case(setting: str, kind: str, execution: str, rank: Any = 2, **options: Any) -> Case:
    (inputs, outputs), kernel_size, extents, conv = SETTINGS[setting]
    name = "-".join([setting, kind, execution, *options])
    return Case(
        name,
        TensorizedConv2d,
        partial(nn.Conv2d, inputs, outputs, kernel_size, **conv),
        rank,
        lambda leading: torch.randn(*leading, inputs, *extents),
        {**KINDS[kind], "execution": execution, **options},
        thorough=name in THOROUGH,
        inductor=name in INDUCTOR,
        exact="separable" not in kind,
    )


def contracted(setting: str, kind: str) -> str:
    if (
        setting == "groups" or "separable" in kind
    ):  # groups are one tensor, which only the composed kernel can tell apart
        return "one_conv"
    return "two_convs" if kind == "train" else "three_convs"


class TestTensorizedConv(TensorContract):
    cases = (
        case("plain", "train", "auto"),
        case("plain", "tucker", "auto", (3, 2)),
        case("plain", "train", "one_conv"),
        case("plain", "tucker", "one_conv", core="train"),
        case("plain", "tucker", "one_conv", dims=(6, 6, 6)),
        case("plain", "train", "two_convs", dims=(6, 4, 9)),
        case("plain", "separable-train", "auto", dims=(6, 4)),
        case("plain", "separable-tucker", "auto", core="whole", dims=(6, 4)),
        # every setting, of either method in turn; all others stand in the tests below
        *(case(setting, kind, contracted(setting, kind)) for setting, kind in zip(SETTINGS, TURNS, strict=True)),
        case("plain", "train", "two_convs"),
        case("groups", "tucker", "one_conv"),
        case("unequal", "separable-tucker", "one_conv"),
        case("circular", "separable-train", "one_conv"),
    )


def test_every_case_to_be_looked_at_thoroughly_exists() -> None:
    assert {made.name for made in TestTensorizedConv.cases if made.thorough} == THOROUGH
    assert {made.name for made in TestTensorizedConv.cases if made.inductor} == INDUCTOR


@pytest.mark.parametrize(
    ("setting", "kind"),
    # Separating what cannot be separated raises: see the wrong arguments.
    [(s, k) for s in SETTINGS for k in KINDS if not ("separable" in k and s in NOT_SEPARABLE)],
)
def test_every_setting_runs_alike_in_every_kind(setting: str, kind: str) -> None:
    made = case(setting, kind, "auto")
    layer, x = made.make_layer(), made.make_input(3)
    dense = layer.to_dense()
    for execution in layer.executions:
        layer.execution = execution
        assert error(layer(x), dense(x)) < 1e-12
        assert error(*(gradients(module, x, [x])[0] for module in (layer, dense))) < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_zero_still_receive_a_gradient(kind: str) -> None:
    made = case("plain", kind, "auto")
    dense, x = made.make_dense(), made.make_input(3)
    with torch.no_grad():
        dense.weight[:, 1] = 0  # one input channel alone, as pruning leaves it
    layer = made.factorize(dense)
    if layer.depthwise is not None:
        assert layer.depthwise.flatten(1).norm(dim=1).min() > 0
    nn.init.zeros_(dense.weight)
    layer = made.factorize(dense)
    assert layer.weight.abs().max() == 0
    assert max(gradient.abs().max() for gradient in gradients(layer, x, list(layer.factors))) > 0


@st.composite
def drawn_layers(draw: st.DrawFn) -> tuple[Any, Tensor]:
    """Draw a layer of any settings and an input that fits it."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    kernel_size, dilation = pair(1, 4), pair(1, 2)
    separable = draw(st.booleans()) and kernel_size != (1, 1)
    groups = 1 if separable else draw(st.integers(1, 2))
    padding = draw(st.sampled_from(["same", "valid", None]))
    layer = TensorizedConv2d(
        groups * draw(st.integers(1, 4)),
        groups * draw(st.integers(1, 4)),
        kernel_size,
        1,
        stride=1 if padding == "same" else pair(1, 3),
        padding=padding or pair(0, 2),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])),
        method=draw(st.sampled_from(["tensor_train", "tucker"])),
        separable=separable,
        init=partial(nn.init.normal_, generator=torch.Generator().manual_seed(0)),
        dtype=torch.float64,
    )
    reach = [d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True)]
    leading = draw(st.sampled_from([(), (1,), (2,)]))
    extents = [r + extra for r, extra in zip(reach, pair(3, 4), strict=True)]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*leading, layer.in_channels, *extents, generator=generator, dtype=torch.float64)
    return layer, x.requires_grad_()


@settings(deadline=None, max_examples=50)
@given(drawn=drawn_layers())
def test_layers_of_any_settings_compute_what_their_dense_layers_do(drawn: tuple[Any, Tensor]) -> None:
    layer, x = drawn
    dense = layer.to_dense()
    for execution in layer.executions:
        layer.execution = execution
        assert error(layer(x), dense(x)) < 1e-11
        assert error(*(gradients(module, x, [x])[0] for module in (layer, dense))) < 1e-11


def test_a_separable_kernel_is_recovered_and_any_other_approximated_at_its_best() -> None:
    dense = nn.Conv2d(4, 6, 3, bias=False).double()
    pointwise, taps = torch.randn(6, 4, 1, 1, dtype=torch.float64), torch.randn(4, 3, 3, dtype=torch.float64)
    dense.weight = nn.Parameter(pointwise * taps)
    layer = TensorizedConv2d.from_dense(dense, (3, 2), separable=True)  # dims (3, 4, 2): full rank
    assert layer.rank == layer.folding.full_ranks
    assert error(layer.weight, dense.weight) < 1e-12
    weight = -torch.randn(6, 4, 3, 3, dtype=torch.float64).abs()
    layer.set_weight(weight)
    assert (layer.depthwise.flatten(1).max(1).values == layer.depthwise.flatten(1).abs().max(1).values).all()  # type: ignore[union-attr]
    spectrum = torch.linalg.svdvals(weight.flatten(2).transpose(0, 1)).square()
    assert abs((layer.weight - weight).square().sum() - spectrum[:, 1:].sum()) < 1e-10 * spectrum.sum()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"separable": True, "kernel_size": 1}, "needs a kernel larger than one position and groups=1, got 8x4x1x1"),
        ({"separable": True, "groups": 2}, "and groups=1, got 8x2x3x3 and groups=2"),
        (
            {"separable": True, "dims": (8, 4, 9)},
            "dims (8, 4, 9) multiply to 288, but the weight 8x4x1x1 has 32 entries",
        ),
        ({"dims": (8, 4, 4)}, "dims (8, 4, 4) multiply to 128, but the weight 8x4x3x3 has 288 entries"),
        ({"rank": 0}, "rank must be a whole number of at least 1, up to (2, 8, 16, 9) for dims"),
        ({"execution": "three_convs"}, 'execution must be one of "two_convs", "one_conv", "auto"'),
        ({"execution": "two_convs", "groups": 2}, 'do not allow for a 8x2x3x3 weight with groups=2; use "one_conv"'),
        ({"groups": 3}, "in_channels must be divisible by groups"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorizedConv2d(**{"in_channels": 4, "out_channels": 8, "kernel_size": 3, "rank": 2, **arguments})


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_takes_images_of_another_size(kind: str) -> None:
    layer = TensorizedConv2d(4, 6, 3, 2, stride=2, padding=1, dtype=torch.float64, **KINDS[kind])
    x, other = (torch.randn(2, 4, *extents, dtype=torch.float64) for extents in ((9, 8), (12, 11)))
    sizes = ({2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(layer, (x,), dynamic_shapes=sizes).module()
    assert error(program(other), layer(other)) < 1e-12


def test_an_empty_batch_gives_an_empty_output() -> None:
    for kind in KINDS.values():
        assert TensorizedConv2d(4, 6, 3, 2, padding=1, **kind)(torch.randn(0, 4, 5, 5)).shape == (0, 6, 5, 5)
