"""Batches that do not fit, reach too little or give too little, and wrong arguments of ``fz.Calibrated``."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import factorized as fz
from tests.models.unchanged import unchanged


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.lstm = nn.Linear(12, 12), nn.Linear(12, 12), nn.LSTM(12, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(self.used(x))[0]
        return out


def test_layers_that_never_run_are_named_and_spectral() -> None:
    dense, x = Unused(), torch.randn(30, 4, 12)
    plan = fz.plan(dense, rank=3, keep_first_and_last=False)
    message = r"unused, lstm\.weight_ih_l0, lstm\.weight_hh_l0 \(never called as layers; weights of recurrent networks"
    with pytest.warns(UserWarning, match=f"no batch reaches {message}") as caught:
        ours = fz.factorize(copy.deepcopy(dense), plan, init=fz.Calibrated([x]))
    assert caught[0].filename == __file__
    spectral = fz.factorize(copy.deepcopy(dense), plan)
    torch.testing.assert_close(ours.unused.state_dict(), spectral.unused.state_dict())
    torch.testing.assert_close(ours.lstm.state_dict(), spectral.lstm.state_dict())
    assert not torch.allclose(ours.used.weight, spectral.used.weight)


def test_fewer_samples_than_directions_are_a_warning_with_the_number_needed() -> None:
    dense, x = nn.Sequential(nn.Linear(20, 16)), torch.randn(6, 20)
    message = r"fewer samples than directions in the inputs of 0: 6 where at least 20 are needed.*give 4 times as many"
    with pytest.warns(UserWarning, match=message):
        model = fz.factorize(copy.deepcopy(dense), rank=8, keep_first_and_last=False, init=fz.Calibrated([x]))
    torch.testing.assert_close(model(x), dense(x), rtol=0, atol=1e-3)  # six outputs fit into rank 8


def test_the_layer_that_lacks_most_samples_says_how_many_are_needed() -> None:
    model = nn.Sequential(nn.Linear(10, 40), nn.Linear(40, 20), nn.Linear(20, 8))
    message = r"in the inputs of 0, 1, 2: 6 where at least 40 are needed.*give 7 times as many"
    with pytest.warns(UserWarning, match=message):
        fz.factorize(model, rank=3, keep_first_and_last=False, init=fz.Calibrated([torch.randn(6, 10)]))


class Rare(nn.Module):
    """Two layers of one weight, of which the second is called with a few of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(12, 12), nn.Linear(12, 12)
        self.rarely.weight = self.often.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rarely(self.often(x)[:5])
        return out


def test_of_layers_that_share_a_weight_the_one_with_few_samples_is_what_the_warning_counts() -> None:
    with pytest.warns(UserWarning, match=r"in the inputs of often: 5 where at least 12 are needed"):
        fz.factorize(Rare(), rank=3, keep_first_and_last=False, init=fz.Calibrated([torch.randn(50, 12)]))


def test_a_table_warns_only_if_fewer_rows_are_looked_up_than_it_is_wide() -> None:
    table = nn.Sequential(nn.Embedding(50, 8))
    fz.factorize(copy.deepcopy(table), rank=3, keep_first_and_last=False, init=fz.Calibrated([torch.arange(9)]))
    with pytest.warns(UserWarning, match="4 where at least 8"):
        fz.factorize(table, rank=3, keep_first_and_last=False, init=fz.Calibrated([torch.arange(4)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": torch.randn(4, 20)}, r"iterable of batches, such as a DataLoader, got Tensor; put .* \[batch\]"),
        ({"batches": {"x": torch.randn(4, 20)}}, r"iterable of batches.*got dict"),
        ({"batches": 3}, "iterable of batches.*got int"),
        ({"batches": "data"}, "iterable of batches.*got str"),
        ({"batches": [], "samples": 0}, "samples must be a whole number of at least 1, got 0"),
        ({"batches": [], "samples": 2.5}, "samples must be a whole number"),
        ({"batches": [], "layers_per_pass": -1}, "layers_per_pass must be a whole number of at least 1, got -1"),
        ({"batches": iter([]), "sequential": True}, "sequential runs the batches several times.*pass a list"),
        ({"batches": iter([]), "layers_per_pass": 1}, "layers_per_pass runs the batches several times.*pass a list"),
    ],
)
def test_wrong_arguments_say_what_is_allowed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.Calibrated(**arguments)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches holds no examples"),
        (iter([]), "batches holds no examples.*used before"),
        (
            [torch.randn(8, 20), torch.randn(8, 19)],
            r"batch 1 of Calibrated\(batches\) does not run through Sequential",
        ),
        ([{"y": torch.randn(8, 20)}], "batch 0 of .* does not run through Sequential.*a dict of keywords"),
        ([torch.randn(30, 20), torch.full((1, 20), torch.nan)], "0: its inputs on the batches .* hold NaN"),
        ([torch.randn(8, 20, device="meta")], "batch 0 of .*: it is on the meta device, and has no values. Give"),
        ([{"input": torch.randn(8, 20, device="meta")}], "it is on the meta device, and has no values"),
        ([torch.randn(8, 20).numpy()], "batch 0 of .* Sequential: it is of type ndarray. Give .* a tensor"),
        (["text"], "batch 0 of .*: it is of type str"),
        ([3], "batch 0 of .*: it is of type int"),
    ],
)
def test_batches_that_do_not_fit_leave_the_model_unchanged(batches: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16))
    with unchanged(model), pytest.raises(ValueError, match=message):
        fz.factorize(model, rank=3, keep_first_and_last=False, init=fz.Calibrated(batches))
    assert not any(module._forward_pre_hooks for module in model.modules())


class Stream(IterableDataset[Tensor]):
    """As many rows as wanted; nobody knows how many there are."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(320, 20))


def test_batches_that_go_on_and_on_are_a_warning_that_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("factorized.planning.calibration.MANY", 100)
    batches = [torch.randn(64, 20)] * 5
    loader = DataLoader(
        TensorDataset(torch.cat(batches)), 64, collate_fn=lambda rows: torch.stack([x for (x,) in rows])
    )
    stream: DataLoader[Tensor] = DataLoader(Stream(), 64)

    def calibrate(calibrated: fz.Calibrated) -> None:
        dense = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 16))
        fz.factorize(dense, rank=3, keep_first_and_last=False, init=calibrated)

    for endless in (iter(batches), stream):
        with pytest.warns(UserWarning, match=r"has read 128 examples.*; if it never ends, stop this and pass samples="):
            calibrate(fz.Calibrated(endless))
    for bounded in (fz.Calibrated(iter(batches), samples=200), fz.Calibrated(stream, samples=200)):
        calibrate(bounded)  # warnings are errors
    for known in (batches, loader):
        calibrate(fz.Calibrated(known))


def test_weights_on_the_meta_device_cannot_be_calibrated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(20, 16))
    with pytest.raises(ValueError, match=r"0: weight is on the meta device.*load the weights first"):
        fz.factorize(model, rank=3, keep_first_and_last=False, init=fz.Calibrated([torch.randn(8, 20)]))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named_and_nothing_is_changed(value: float) -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.Linear(16, 16))
    with torch.no_grad():
        model[1].weight[2, 3] = value
    batches = [torch.randn(40, 20)]
    with unchanged(model), pytest.raises(ValueError, match=r"1: weight holds NaN or infinit"):
        fz.factorize(model, rank=3, keep_first_and_last=False, init=fz.Calibrated(batches))


def test_a_single_layer_takes_no_calibration_of_a_model() -> None:
    with pytest.raises(ValueError, match=r"init must be one of .* got Calibrated\(list, samples=None"):
        fz.FactorizedLinear.from_dense(nn.Linear(4, 4), 2, init=fz.Calibrated([torch.randn(8, 4)]))  # type: ignore[arg-type]


class Elsewhere(torch.Tensor):
    """A tensor that arrives once it is moved, as one on another device."""

    moved: list[str]

    def to(self, device: torch.device) -> Tensor:  # type: ignore[override]
        self.moved.append(str(device))
        return self.as_subclass(Tensor)


def elsewhere(tensor: Tensor, moved: list[str]) -> Tensor:
    found = tensor.as_subclass(Elsewhere)
    found.moved = moved
    return found


def test_data_on_another_device_are_moved_to_that_of_the_model() -> None:
    moved: list[str] = []
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 4))
    for form in (tuple, lambda pair: ({"input": pair[0]}, pair[1]), lambda pair: ((pair[0],), pair[1])):
        batch = form((elsewhere(torch.randn(40, 20), moved), elsewhere(torch.randint(4, (40,)), moved)))
        given = fz.Calibrated([batch], loss=nn.functional.cross_entropy)
        options: dict[str, Any] = {"ratio": 0.7, "keep_first_and_last": False, "allocate": "spectrum"}
        fz.factorize(copy.deepcopy(model), init=given, **options)
        assert moved == ["cpu"] * 3  # inputs and labels for ranks, inputs for factors
        moved.clear()


class Nested(nn.Module):
    """Takes a list of tensors in a dict, as detectors do, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 16)

    def forward(self, given: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {"out": self.layer(torch.stack(given["rows"]))}


def test_tensors_inside_lists_and_dicts_are_moved_too() -> None:
    moved: list[str] = []
    rows = [elsewhere(row, moved) for row in torch.randn(40, 20)]
    labels = [{"wanted": elsewhere(torch.randn(40, 16), moved)}]
    given = fz.Calibrated(
        [({"given": {"rows": rows}}, labels)],
        loss=lambda out, labels: (out["out"] - labels[0]["wanted"]).square().mean(),
    )
    options: dict[str, Any] = {"ratio": 0.7, "keep_first_and_last": False, "allocate": "spectrum"}
    fz.factorize(Nested(), init=given, **options)
    assert moved == ["cpu"] * (40 + 1 + 40)


class Rows(NamedTuple):
    rows: Tensor
    scale: Tensor


class OfNamedTuples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 16)

    def forward(self, given: Rows, others: OrderedDict[str, Rows]) -> Tensor:
        return self.layer(given.rows * given.scale + others["more"].rows)


def test_tensors_inside_named_tuples_and_ordered_dicts_are_moved_too() -> None:
    moved: list[str] = []
    given = Rows(elsewhere(torch.randn(40, 20), moved), elsewhere(torch.ones(()), moved))
    batch = ((given, OrderedDict(more=given)), torch.zeros(40))
    fz.factorize(OfNamedTuples(), rank=4, keep_first_and_last=False, init=fz.Calibrated([batch]))
    assert moved == ["cpu"] * 4
