"""Moments of one layer after another, each behind the factors of those before it: ``Calibrated(sequential=True)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from factorized.nn.moments import InputPairs, collecting
from factorized.nn.running import removing, run_once
from factorized.planning.calibration import Calibrated, Collected, held_once, moments_of, parts


def collect_in_order(
    model: nn.Module,
    calibration: Calibrated,
    sharing: Mapping[str, Mapping[str, nn.Module]],
    replacing: Mapping[str, nn.Module],
) -> Iterator[tuple[str, Collected]]:
    """Yield what ``collect`` yields, in the order in which the model calls the layers; their inputs come in pairs.

    One input of a pair is that of the dense model. The other is that of a model in which the layers yielded before
    compute what ``replacing`` has for them by name: whoever asks for the next layers must have filled those.
    """
    groups = _called_together(model, calibration, sharing)
    called = {leader for group in groups for leader in group}
    biases = held_once(model)
    filled: dict[nn.Module, nn.Module] = {}
    for group in groups:
        reached: list[str] = []
        for part in parts(group, calibration.layers_per_pass):
            layers = {name: layer for leader in part for name, layer in sharing[leader].items()}
            pairs = {name: moments_of(InputPairs, layer, biases) for name, layer in layers.items()}
            _run_pairs(model, calibration, {layers[name]: one for name, one in pairs.items()}, filled)
            for leader in part:
                ran = {name: pairs.pop(name) for name in sharing[leader] if pairs[name].samples}
                reached += [leader] if ran else []  # none if a router now leads elsewhere
                yield leader, Collected(ran, {})
                ran.clear()  # the caller's loop holds it while the batches run again
        filled |= {layer: replacing[name] for leader in reached for name, layer in sharing[leader].items()}
    for leader in sharing:
        if leader not in called:
            yield leader, Collected({}, {})


def _run_pairs(
    model: nn.Module,
    calibration: Calibrated,
    pairs: Mapping[nn.Module, InputPairs],
    filled: Mapping[nn.Module, nn.Module],
) -> None:
    """Run every batch through the dense model, and through the one with the factors that are filled."""
    for inputs, _, text in calibration.examples():
        expecting = [layer.register_forward_pre_hook(one.expect, with_kwargs=True) for layer, one in pairs.items()]
        with removing(expecting):
            run_once(model, inputs, text)
        with _replaced(filled), collecting(pairs):
            run_once(model, inputs, text)
        for one in pairs.values():
            one.end()


@contextmanager
def _replaced(filled: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Let layers return what others compute, inside. The model keeps its modules, and no weight is held twice."""
    hooks = [layer.register_forward_hook(_by(new), with_kwargs=True) for layer, new in filled.items()]
    with removing(hooks):
        yield


def _by(new: nn.Module) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
    def replace(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        return new.forward(*arguments, **keywords)

    return replace


def _called_together(
    model: nn.Module, calibration: Calibrated, sharing: Mapping[str, Mapping[str, nn.Module]]
) -> list[list[str]]:
    """Return the weights whose layers are called, in order; those first called with one and the same input together."""
    groups: list[list[str]] = []
    last: list[tuple[Tensor, int | None]] = []  # the input of the last call, and its version

    def note(leader: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            given = arguments[0] if arguments else next(iter(keywords.values()))
            version = None if given.is_inference() else given._version  # which tells whether it was written to
            again = bool(last) and last[0][0] is given and version is not None and last[0][1] == version
            if not any(leader in group for group in groups):
                if again:
                    groups[-1].append(leader)
                else:
                    groups.append([leader])
            last[:] = [(given, version)]

        return hook

    hooks = [
        layer.register_forward_pre_hook(note(leader), with_kwargs=True)
        for leader, layers in sharing.items()
        for layer in layers.values()
    ]
    with removing(hooks):
        calibration.run(model)
    return groups
