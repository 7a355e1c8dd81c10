"""What is computed once and kept is not rounded, by an autocast around the call or by a setting of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import factorized as fz
from tests.rounding import precisions, rounding_products, set_precision, setting

SETTINGS: dict[str, Callable[[], None]] = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "everything": lambda: set_precision("generic", "all", "bf16"),
    "all of a backend": lambda: set_precision("mkldnn", "all", "bf16"),
    "products of a backend": lambda: set_precision("mkldnn", "matmul", "tf32"),
    "each the same": lambda: [set_precision(*place, "tf32") for place in (("generic", "all"), ("mkldnn", "matmul"))],
}


@contextmanager
def medium() -> Iterator[None]:
    with setting(SETTINGS["medium"]), rounding_products():
        yield


Context = Callable[[], AbstractContextManager[object]]
# a context that rounds, and what it is compared with
ROUNDED: dict[str, tuple[Context, Context]] = {
    "autocast": (partial(torch.autocast, "cpu", torch.bfloat16), nullcontext),
    "setting": (medium, rounding_products),
}
every_rounding = pytest.mark.parametrize(("rounded", "plain"), ROUNDED.values(), ids=ROUNDED)


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 5)
    )


def attention() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True))


def factorized() -> nn.Sequential:
    return fz.factorize(dense(), ratio=0.6, min_size=0)


def with_fewer_heads() -> nn.Sequential:
    return fz.factorize(attention(), ratio=0.6, attention="heads", keep_first_and_last=False)


def beside_residuals() -> nn.Sequential:
    return fz.factorize(dense(), fz.Residual(fz.LowRank()), rank=3, min_size=0)


def loaded() -> nn.Sequential:
    model = beside_residuals()
    fz.load_dense(model, {name: 2 * value for name, value in dense().state_dict().items()})
    return model


@every_rounding
@pytest.mark.parametrize(
    "make",
    [
        beside_residuals,
        with_fewer_heads,
        loaded,
        lambda: fz.factorize(dense(), fz.Tucker(), ratio=0.6, min_size=0),
        lambda: factorized()[4].to_dense(),
        lambda: fz.compose(factorized()),
        lambda: fz.compose(with_fewer_heads()),
        lambda: fz.lower(fz.factorize(dense(), fz.Overcomplete("deep"))),
        lambda: fz.truncate(factorized(), rank_scale=0.5),
        lambda: fz.spectral_init_attention(attention()),
    ],
    ids=[
        "residual",
        "heads",
        "load_dense",
        "tucker",
        "to_dense",
        "compose",
        "heads back",
        "lower",
        "truncate",
        "split",
    ],
)
def test_weights_are_those_without_rounding(make: Callable[[], nn.Module], rounded: Context, plain: Context) -> None:
    torch.manual_seed(1)
    with plain():
        expected = make().state_dict()
    torch.manual_seed(1)
    with rounded():
        found = make().state_dict()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@every_rounding
def test_figures_of_products_are_those_without_rounding(rounded: Context, plain: Context) -> None:
    def figures() -> list[float | None]:
        model = factorized()
        bounds = fz.margin_bounds(model[4:], [(torch.ones(2, 32), torch.tensor([0, 1]))], gamma=1.0)
        first = fz.diagnose(model, lr=0.1)[0]
        return [first.frobenius, first.spectral, bounds.log10_frobenius_term, *fz.NormMatcher(model).record().values()]

    with plain():
        expected = figures()
    with rounded():
        assert figures() == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("change", SETTINGS.values(), ids=SETTINGS)
def test_settings_hold_afterwards_each_at_its_place(change: Callable[[], None]) -> None:
    model = factorized()
    with setting(change):
        before, seen = precisions(), []
        model[4].register_forward_pre_hook(lambda *_: seen.append(precisions()))
        fz.compose(model)
        model[4](torch.ones(1, 32))
        model[4].weight = dense()[4].weight.detach()
        with pytest.raises(ValueError, match="NaN"):
            model[4].weight = torch.full((32, 32), torch.nan)
        assert precisions() == before == seen[0]
        for place in (("generic", "all"), ("mkldnn", "all")):  # what a more general one decided follows it still
            set_precision(*place, "ieee")
        changed = precisions()
    with setting(change):
        for place in (("generic", "all"), ("mkldnn", "all")):
            set_precision(*place, "ieee")
        assert changed == precisions()


def test_a_calibrated_residual_is_the_dense_weight_though_the_model_ran_under_autocast() -> None:
    given = dense()
    batches = fz.Calibrated([torch.randn(192, 3, 5, 5)])
    with torch.autocast("cpu", torch.bfloat16):
        model = fz.factorize(dense(), fz.Residual(fz.LowRank()), rank=3, min_size=0, init=batches)
    for found, expected in zip(fz.compose(model), given, strict=True):
        if isinstance(expected, (nn.Conv2d, nn.Linear)):
            torch.testing.assert_close(found.weight, expected.weight, rtol=1e-5, atol=1e-6)
