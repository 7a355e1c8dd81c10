"""Models whose code reads the weights of their layers, lowered."""

from __future__ import annotations

import inspect
import io
import linecache
import sys
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import factorized as fz
from factorized.surgery.reads import called_with_more, weights_read

NAMES = ["used", "typed", "held", "passed", "looped.0", "looped.1", "helped", "initialized", "plain"]


def transposed(layer: nn.Linear) -> Tensor:
    return layer.weight.mT


class Reader(nn.Module):
    """Layers that are read in every way that the models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            if "." not in name:
                setattr(self, name, nn.Linear(8, 8))
        self.looped = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.normal_(self.initialized.weight)

    def _helped(self, x: Tensor) -> Tensor:
        return x @ self.helped.weight

    def forward(self, x: Tensor, other_path: bool = False) -> Tensor:
        if isinstance(self.plain.weight, Tensor):
            x = self.typed(x.to(self.typed.weight.dtype).to(self.typed.weight.device))
        x = F.linear(x, self.used.weight, self.used.bias)
        held = self.held
        if other_path:
            x = x @ held.weight
        x = x @ transposed(self.passed)
        for layer in self.looped:
            x = x + layer.weight.sum()
        return self.plain(self.initialized(self.held(self._helped(x))))


class Twice(nn.Module):
    """Other layers of the same names, of which nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.used = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.reader(x))


def factorized() -> nn.Module:
    torch.manual_seed(0)
    return fz.factorize(Twice().double(), rank=2, keep_first_and_last=False)


def test_the_source_says_which_weights_are_read() -> None:
    names = [f"reader.{name}" for name in NAMES] + ["used"]
    assert weights_read(Twice(), names) == {
        "reader.used": {""},
        "reader.typed": {"dtype", "device"},
        "reader.held": {""},
        "reader.passed": {""},
        "reader.looped.0": {""},
        "reader.looped.1": {""},
        "reader.helped": {""},
        "reader.plain": {"isinstance"},
    }


def test_a_notebook_shows_the_source_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(inspect.getmodule(Twice))  # type: ignore[arg-type]  # this very file
    cell = source[source.index("NAMES =") : source.index("def factorized")]
    notebook: Any = ModuleType("notebook")
    notebook.__dict__.update(nn=nn, F=F, Tensor=Tensor)
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(cell), None, cell.splitlines(keepends=True), "<cell>"))
    exec(compile(cell, "<cell>", "exec"), notebook.__dict__)
    with pytest.raises((OSError, TypeError)):
        inspect.getsource(notebook)
    names = [f"reader.{name}" for name in NAMES] + ["used"]
    assert weights_read(notebook.Twice(), names) == weights_read(Twice(), names)


def test_layers_whose_weight_is_read_are_composed_and_named() -> None:
    model = factorized()
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"reader\.used 32 → 64 \(the model's code reads its weight; .*and 3 more"):
        lowered = fz.lower(model)
    pairs = {name for name, module in lowered.named_modules() if isinstance(module, nn.Sequential)}
    assert pairs == {"reader.typed", "reader.initialized", "reader.plain", "used"}
    torch.testing.assert_close(lowered(x), model(x))


def test_with_an_example_only_what_a_run_asks_for_is_composed() -> None:
    model = factorized()
    x = torch.randn(3, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"reader\.used 32 → 64 \(Reader reads its weight\)"):
        lowered = fz.lower(model, example_input=x)
    pairs = {name for name, module in lowered.named_modules() if isinstance(module, nn.Sequential)}
    assert pairs == {"reader.held", "reader.typed", "reader.initialized", "reader.plain", "used"}
    torch.testing.assert_close(lowered(x), model(x))


def test_an_example_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="example_input does not run through Twice"):
        fz.lower(factorized(), example_input=torch.randn(3, 7, dtype=torch.float64))


class Up(nn.Module):
    """Transposed convolutions that are called in every way that U-Nets call them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(8, 8, 3, stride=2)
        self.keyword, self.positional, self.assigned, self.alone, self.other = (
            nn.ConvTranspose2d(8, 8, 3, stride=2) for _ in range(5)
        )
        self.indexed, self.looped = (nn.ModuleList([nn.ConvTranspose2d(8, 8, 3, stride=2)]) for _ in range(2))

    def forward(self, x: Tensor, other_path: bool = False) -> Tensor:
        extents = list(x.shape[-2:])
        x = self.keyword(self.down(x), output_size=extents) + self.positional(self.down(x), extents)
        assigned = self.assigned
        x = assigned(self.down(x), extents) + self.indexed[0](self.down(x), extents)
        for layer in self.looped:
            x = x + layer(self.down(x), output_size=extents)
        if other_path:
            x = x + self.other(self.down(x), extents)
        return self.alone(x)


def test_the_source_says_which_layers_are_called_with_more_than_an_input() -> None:
    names = [name for name, module in Up().named_modules() if not list(module.children())]
    expected = ["keyword", "positional", "assigned", "other", "indexed.0", "looped.0"]
    assert called_with_more(Up(), names) == expected


@pytest.mark.parametrize(
    ("run", "reason", "pairs"),
    [
        (False, "the model's code gives it an output_size; pass example_input=", {"down", "alone"}),
        (True, r"Up gives it an output_size\)", {"down", "alone", "other"}),
    ],
)
def test_transposed_convolutions_that_are_given_an_output_size_are_composed(
    run: bool, reason: str, pairs: set[str]
) -> None:
    torch.manual_seed(0)
    model = fz.factorize(Up().double(), rank=2, keep_first_and_last=False)
    x = torch.randn(2, 8, 8, 8, dtype=torch.float64)  # of even extents, which the layers do not give without being told
    with pytest.warns(UserWarning, match=rf"keyword 96 → 576 \({reason}"):
        lowered = fz.lower(model, example_input=x if run else None)
    chains = {name for name, module in lowered.named_modules() if isinstance(module, nn.Sequential)}
    assert chains == pairs
    torch.testing.assert_close(lowered(x), model(x))


class Strict(nn.Module):
    """Refuses what is not a plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.first, nn.Sequential):
            raise TypeError("first must not be a pair")
        return self.second(self.first(x))


def test_a_model_that_does_not_run_lowered_is_refused_and_exclude_helps() -> None:
    model = fz.factorize(Strict(), rank=2, keep_first_and_last=False)
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"does not run on example_input: first must not be a pair\. Name .* exclude="):
        fz.lower(model, example_input=x)
    with pytest.warns(UserWarning, match=r"first 32 → 64 \(in exclude=\)"):
        lowered = fz.lower(model, exclude=["fir*"], example_input=x)
    assert type(lowered.first) is nn.Linear
    assert type(lowered.second) is nn.Sequential


def test_exclude_takes_containers() -> None:
    model = fz.factorize(nn.ModuleDict({"one": Strict(), "two": Strict()}), rank=2, keep_first_and_last=False)
    with pytest.warns(UserWarning, match=r"one\.first 32 → 64 \(in exclude=\)"):
        lowered = fz.lower(model, exclude=["one"])
    assert {type(layer) for layer in lowered["one"].children()} == {nn.Linear}
    assert {type(layer) for layer in lowered["two"].children()} == {nn.Sequential}


def test_what_exclude_names_must_be_there() -> None:
    model = fz.factorize(Strict(), rank=2, keep_first_and_last=False)
    with pytest.raises(
        ValueError, match=r"exclude='third' matches no factorized layer of Strict; they include 'first'"
    ):
        fz.lower(model, exclude=["third"])
    with pytest.raises(ValueError, match="exclude must be a list of names or globs, got 'first'"):
        fz.lower(model, exclude="first")


def test_a_pair_shows_its_settings_and_its_type_and_keeps_them_in_copies() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 16, 4, stride=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x.to(self.patches.weight.dtype)) / self.patches.stride[0]

    model = fz.factorize(Net(), rank=2, keep_first_and_last=False)
    lowered = fz.lower(model)
    buffer = io.BytesIO()
    torch.save(lowered.patches, buffer)
    buffer.seek(0)
    x = torch.randn(2, 3, 8, 8)
    for copy in (lowered.patches, deepcopy(lowered).patches, torch.load(buffer, weights_only=False)):
        assert type(copy) is nn.Sequential
        assert (copy.stride, copy.in_channels, copy.kernel_size) == ((4, 4), 3, (4, 4))
        assert list(copy.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    torch.testing.assert_close(lowered(x), model(x))
    assert lowered.double().patches.weight.dtype == torch.float64
    lowered(x.double())


def test_layers_that_share_their_factors_are_composed_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(x) @ self.first.weight

    model = fz.factorize(Tied(), rank=2, keep_first_and_last=False)
    grows = "lowered, Tied has 80 parameters, more than the factorized 48: first 32 → 64"
    with pytest.warns(UserWarning, match=grows) as caught:
        lowered = fz.lower(model)
    assert "second" not in str(caught[0].message)  # it is the same weight, which is counted once
    assert lowered.first.weight is lowered.second.weight


@pytest.mark.parametrize("exclude", [(), ("second",)])
def test_a_layer_is_known_by_all_of_its_names(exclude: tuple[str, ...]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.second.weight) if not exclude else self.first(x)

    model = fz.factorize(Twice(), rank=2, keep_first_and_last=False)
    with pytest.warns(UserWarning, match="first 32 → 64"):
        lowered = fz.lower(model, exclude=exclude)
    assert type(lowered.first) is nn.Linear
    x = torch.randn(3, 8)
    torch.testing.assert_close(lowered(x), model(x))


def test_a_traced_program_reads_what_its_graph_does() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Linear(16, 16), nn.ConvTranspose1d(16, 16, 3, stride=2)
            self.plain = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(self.first(self.plain(x)), self.first.weight)
            return self.up(x.unsqueeze(-1), [4])

    traced = torch.fx.symbolic_trace(Reads())
    model = fz.factorize(nn.Sequential(traced), rank=2, keep_first_and_last=False, min_size=0)
    with pytest.warns(UserWarning, match=r"0.first 64 → 256 .* reads its weight.*; 0.up 128 → 768 .* an output_size"):
        lowered = fz.lower(model)
    x = torch.randn(3, 16)
    torch.testing.assert_close(lowered(x), model(x))
    part = lowered.get_submodule("0")
    kinds = [type(part.get_submodule(name)) for name in ("first", "up", "plain")]
    assert kinds == [nn.Linear, nn.ConvTranspose1d, nn.Sequential]
