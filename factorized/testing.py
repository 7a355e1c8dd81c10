"""The contract that every layer passes in every format, for pytest: subclass ``LayerContract`` and give it ``cases``.

A case with ``thorough=True`` runs all tests. The other cases, such as the many geometries of a convolution, are only
compared with their dense layer, forward and backward.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn

from factorized.decay.forms import forms
from factorized.formats.format import Format
from factorized.formats.kernel import to_matrix
from factorized.nn.init import fill_of
from factorized.planning.schemes import read_format
from factorized.surgery.compose import compose
from factorized.surgery.lower import lower

try:
    import pytest
except ImportError as missing:
    raise ImportError('factorized.testing needs pytest; install it with pip install "factorized[dev]"') from missing

Test = Callable[..., None]
EXACT = [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 4e-2), (torch.float16, 4e-3)]


@dataclass(frozen=True)
class Case:
    """A dense layer, the factorized layer and format that replace it, and an input.

    Attributes:
        name: what a failing test calls the case.
        layer: the class of the factorized layer.
        dense: makes the dense layer.
        format: how the weight is held.
        input: makes an input with these leading dimensions; none are a single example.
        full: the format at full rank, which holds any dense weight; None where none does.
        options: arguments of ``from_dense`` besides the format.
        thorough: whether all tests are run, or only those of the forward and backward pass.
        compiles: False where torch cannot compile the dense layer either.

    Examples:
        >>> from factorized.testing import Case
        >>> format = fz.LowRank().at_rank(fz.LowRank().kernel((8, 12)), 3)
        >>> vectors = lambda leading: torch.randn(*leading, 12)
        >>> case = Case("wide", fz.FactorizedLinear, lambda: nn.Linear(12, 8), format, vectors, thorough=True)
        >>> case.make_layer()(case.make_input(5)).shape
        torch.Size([5, 8])
    """

    name: str
    layer: type[Any]
    dense: Callable[[], nn.Module]
    format: Format
    input: Callable[[tuple[int, ...]], Tensor]
    full: Format | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    thorough: bool = False
    compiles: bool = True

    def make_dense(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return the dense layer, always the same."""
        torch.manual_seed(0)
        return self.dense().to(dtype)

    def factorize(self, dense: nn.Module, format: Format | None = None, init: Any = "spectral") -> Any:
        """Return the layer for ``dense``, in the format of the case or another."""
        return self.layer.from_dense(dense, format or self.format, init, **self.options)

    def make_layer(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return a layer none of whose parameters is special: the inner matrices are not identities."""
        layer = self.factorize(self.make_dense(dtype))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return layer

    def make_input(self, *leading: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return an input, always the same; one that is not of indices needs a gradient."""
        torch.manual_seed(1)
        x = self.input(leading)
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x


def _only(condition: Callable[[Case], bool]) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        test.condition = condition  # type: ignore[attr-defined]
        return test

    return mark


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative distance of two tensors of one shape."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients, all dense, of a sum of outputs with different weights."""
    y = run(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return tuple(gradient.to_dense() for gradient in torch.autograd.grad((y * weights).sum(), leaves))


def trained_like(weight: Tensor) -> Tensor:
    """Make a fresh weight like a trained one: positions of different sizes, and a large smooth part of rank one."""
    ramp = torch.linspace(0.1, 3, weight.shape[-1], dtype=weight.dtype)
    rows = torch.linspace(0, 2, weight.shape[0], dtype=weight.dtype).cos()
    columns = torch.linspace(0, 3, weight[0].numel(), dtype=weight.dtype).sin()
    return weight * ramp + torch.outer(rows, columns).view_as(weight)


class LayerContract:
    """The tests that every layer passes in every format; a subclass gives the ``cases``.

    Examples:
        >>> from factorized.testing import LayerContract
        >>> class TestMine(LayerContract):  # in a file that pytest collects
        ...     cases = ()  # each a Case
    """

    cases: ClassVar[Sequence[Case]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test once for each case that it applies to."""
        about = getattr(metafunc.function, "condition", lambda case: case.thorough)
        metafunc.parametrize("case", [pytest.param(case, id=case.name) for case in self.cases if about(case)])

    @_only(lambda case: True)
    def test_in_every_execution_it_computes_what_its_dense_layer_does(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        dense = layer.to_dense()
        shared = [x] if x.requires_grad else []
        biases = [[module.bias] if layer.bias is not None else [] for module in (layer, dense)]
        *rest, weight_gradient = gradients(dense, x, [*shared, *biases[1], dense.weight])
        trained = [factor for factor in layer.factors if factor.requires_grad]
        through_weight = torch.autograd.grad(layer.weight, trained, weight_gradient)
        for execution in layer.executions:
            layer.execution = execution
            for leading in [(3,), (1,), ()]:
                other = case.make_input(*leading)
                assert error(layer(other), dense(other)) < 1e-12
            assert error(layer(input=other), layer(other)) == 0  # named as torch names it
            actual = gradients(layer, x, [*shared, *biases[0], *trained])
            for gradient, expected in zip(actual, [*rest, *through_weight], strict=True):
                assert error(gradient, expected) < 1e-11

    def test_in_every_execution_its_output_can_be_changed_in_place(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        dense = layer.to_dense()

        def changed(module: nn.Module) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                y: Tensor = module(x)
                y += 0.1
                y[0] = 0.5
                return y.relu_()

            return run

        (weight_gradient,) = gradients(changed(dense), x, [dense.weight])
        trained = [factor for factor in layer.factors if factor.requires_grad]
        expected = torch.autograd.grad(layer.weight, trained, weight_gradient)
        for execution in layer.executions:
            layer.execution = execution
            assert error(changed(layer)(x), changed(dense)(x)) < 1e-12
            for gradient, reference in zip(gradients(changed(layer), x, trained), expected, strict=True):
                assert error(gradient, reference) < 1e-11

    @_only(lambda case: case.thorough and case.full is not None)
    @pytest.mark.parametrize(("dtype", "tolerance"), EXACT)
    def test_at_full_rank_it_starts_as_the_dense_layer(self, case: Case, dtype: torch.dtype, tolerance: float) -> None:
        dense, x = case.make_dense(dtype), case.make_input(3, dtype=dtype)
        for weight in (dense.weight.detach(), trained_like(dense.weight.detach())):
            dense.weight = nn.Parameter(weight)
            layer = case.factorize(dense, case.full)
            back = layer.to_dense()
            assert {parameter.dtype for parameter in (*layer.parameters(), *back.parameters(), layer(x))} == {dtype}
            assert error(layer(x), dense(x)) < tolerance
            assert error(back.weight, weight) < tolerance
        with torch.device("meta"):  # a default device misplaces nothing
            assert error(case.factorize(dense, case.full).weight, weight) < tolerance

    @_only(lambda case: case.thorough and case.format.is_product)
    def test_below_full_rank_a_product_starts_as_the_best_approximation(self, case: Case) -> None:
        dense = case.make_dense()
        dense.weight = nn.Parameter(trained_like(dense.weight.detach()))
        layer = case.factorize(dense)
        spectrum = torch.linalg.svdvals(to_matrix(dense.weight.detach(), layer.shape)).square()
        lost = (layer.weight - dense.weight).square().sum() - spectrum[:, layer.rank :].sum()
        assert abs(lost) < 1e-12 * spectrum.sum()

    @_only(lambda case: case.thorough and not (case.format.is_product or case.format.frozen))
    def test_drawn_cores_give_the_weight_the_variance_of_the_dense_init(self, case: Case) -> None:
        dense, reference = case.make_dense(), torch.empty(case.format.shape.weight_shape)
        for init in ("default", "kaiming", "normal", nn.init.ones_):
            torch.manual_seed(2)
            layer = case.factorize(dense, init=init)
            torch.manual_seed(2)
            is_table = init == "default" and layer.form_kind == "embedding"  # which torch draws from N(0, 1)
            (nn.init.normal_ if is_table else fill_of(init, layer.shape))(reference)
            _, count = layer.format.decayed
            # cores outside of what is decayed are drawn by themselves: their mean squares multiply with its
            others = [core.square().mean() for core in layer.factors[count:]]
            found = prod(others, start=layer.product.square().mean())
            assert error(found, reference.square().mean()) < 1e-5
            norms = [core.norm().item() for core in layer.factors[:count]]
            assert max(norms) < 1.001 * min(norms)

    def test_its_norm_and_the_gradient_of_it_are_autograds(self, case: Case) -> None:
        layer = case.make_layer()
        format, count = layer.format.decayed
        cores = list(layer.factors[:count])
        squared = layer.product.square().sum()
        expected = torch.autograd.grad(0.5 * squared, cores)
        two = [torch.stack([core.detach(), 2 * core.detach()]) for core in cores]  # of equal formats in one call
        assert error(format.norm_squared(two), squared * torch.tensor([1.0, 4.0**count], dtype=squared.dtype)) < 1e-12
        for actual, reference in zip(format.gradients(two), expected, strict=True):
            assert error(actual, torch.stack([reference, 2.0 ** (2 * count - 1) * reference])) < 1e-12
        assert all(gradient.abs().max() > 0 for gradient in expected)
        (form,) = forms(nn.Sequential(layer))
        assert [factor.parameter for factor in form.factors] == cores
        assert error(form.norm_squared(form.values).sum(), squared) < 1e-12
        singular, found = torch.linalg.svdvals(to_matrix(layer.product, format.shape)), format.spectrum(cores)
        assert error(found, singular[..., : found.shape[-1]]) < 1e-10
        assert singular[..., format.matrix_rank :].sum() < 1e-9

    def test_its_weight_is_formed_at_its_first_use_and_read_only(self, case: Case) -> None:
        layer, dense = case.make_layer(), case.make_dense()
        before = layer.weight.clone()
        with patch.object(type(layer.format), "compose", side_effect=AssertionError("composed")):
            weight = layer.weight
            told = (weight.shape, weight.dtype, weight.device, weight.requires_grad, weight.numel(), weight.grad)
            assert told == (dense.weight.shape, torch.float64, dense.weight.device, True, dense.weight.numel(), None)
        writes: list[Callable[[], object]] = [
            lambda: nn.init.normal_(layer.weight),
            lambda: layer.weight.data.zero_(),
            lambda: layer.weight[0].fill_(1),
            lambda: layer.weight.view(-1).mul_(2),
        ]
        for write in writes:
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"Set layer\.weight = W"):
                write()
            assert torch.equal(layer.weight, before)

    def test_setting_its_weight_decomposes_it_into_the_factors(self, case: Case) -> None:
        dense = case.make_dense()
        weight = trained_like(dense.weight.detach())
        for value in (weight, nn.Parameter(2 * weight)):
            layer = case.factorize(case.make_dense())
            factors = layer.factors
            layer.weight = value
            dense.weight = nn.Parameter(value.detach())
            assert error(layer.weight, case.factorize(dense).weight) < 1e-10
            assert all(own is factor for own, factor in zip(layer.factors, factors, strict=True))
            assert "weight" not in layer.state_dict()
        with pytest.raises(ValueError, match=f"weight must be {layer.shape} for this layer, got 3x1"):
            layer.weight = torch.ones(3, 1)

    def test_truncated_it_is_what_a_decomposition_of_its_weight_is(self, case: Case) -> None:
        format, factors = case.format, [factor.detach() for factor in case.make_layer().factors]
        for target in format.lowered():
            cores = format.truncate(factors, target)
            assert [tuple(core.shape) for core in cores] == list(target.cores.values())
            expected = target.decompose(format.compose(factors))
            assert error(target.compose(cores), target.compose(expected)) < 1e-10
            assert all(error(core.norm(), other.norm()) < 1e-10 for core, other in zip(cores, expected, strict=True))
            half = format.truncate([factor.half() for factor in factors], target)
            assert {core.dtype for core in half} == {torch.float16}

    def test_its_repr_says_what_it_saves(self, case: Case) -> None:
        shown, used = repr(case.make_layer()), case.format.numel
        assert shown.startswith(f"{case.layer.__name__}(")
        assert f"rank={case.format.rank}" in case.format.describe()
        assert shown.endswith(f"{case.format.describe()}, params={used:,} of {case.format.shape.numel:,})")

    def test_its_format_survives_json_and_says_what_its_neighbours_are(self, case: Case) -> None:
        format = case.format
        assert read_format(format.shape, json.loads(json.dumps(format.to_dict()))) == format
        assert all(other.height > format.height and other.numel > format.numel for other in format.raised())
        assert all(other.height < format.height and other.numel < format.numel for other in format.lowered())
        assert case.full is None or case.full.decayed[0].is_product or not case.full.raised()

    @pytest.mark.filterwarnings("ignore:lowered, :UserWarning")  # that says what grows back to its dense size
    @torch.no_grad()
    def test_lowered_and_composed_it_computes_the_same(self, case: Case) -> None:
        model, x = nn.Sequential(case.make_layer()), case.make_input(3)
        assert [error(plain(model)(x), model(x)) < 1e-12 for plain in (compose, lower)] == [True, True]

    def test_its_state_dict_loads_into_a_fresh_layer(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        state, biases = layer.state_dict(), [] if layer.bias is None else ["bias"]
        assert sorted(state) == sorted([*layer.format.cores, *biases])
        assert [tuple(state[name].shape) for name in layer.format.cores] == list(layer.format.cores.values())
        fresh = case.factorize(case.make_dense(), init=None)
        fresh.load_state_dict(state, strict=True)
        assert error(fresh(x), layer(x)) == 0

    def test_copies_and_pickles_are_equal_and_independent(self, case: Case) -> None:
        layer, x = case.make_layer().eval(), case.make_input(3)
        before = layer(x)
        for other in (deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to_dense()):
            assert error(other(x), before) < (1e-12 if type(other) is not type(layer) else 1e-30)
            assert not other.training
            assert repr(other) == repr(layer if type(other) is type(layer) else case.make_dense())
            assert all(parameter.is_contiguous() for parameter in other.parameters())
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            assert error(layer(x), before) == 0

    @_only(lambda case: case.thorough and case.compiles)
    @pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, of its own tracing
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's, inside inductor
    def test_it_compiles_whole(self, case: Case, backend: str) -> None:
        torch._dynamo.reset()
        layer, x = case.make_layer(), case.make_input(3)
        compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
        leaves = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
        assert error(compiled(x), layer(x)) < 1e-10
        for actual, expected in zip(gradients(compiled, x, leaves), gradients(layer, x, leaves), strict=True):
            assert error(actual, expected) < 1e-10

    @pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")  # torch's, in its exporter
    def test_exported_by_torch_and_to_onnx_it_takes_another_batch_size(self, case: Case) -> None:
        import onnxruntime  # type: ignore[import-untyped]

        layer = case.make_layer(torch.float32).eval()
        x, other = (case.make_input(n, dtype=torch.float32).detach() for n in (3, 5))
        batch = ({0: torch.export.Dim.DYNAMIC},)
        assert error(torch.export.export(layer, (x,), dynamic_shapes=batch).module()(other), layer(other)) < 1e-5
        stored = io.BytesIO()
        exported: Any = torch.onnx.export(layer, (x,), dynamo=True, dynamic_shapes=batch, verbose=False)
        exported.save(stored)
        session = onnxruntime.InferenceSession(stored.getvalue(), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        assert error(torch.from_numpy(y), layer(other)) < 1e-4

    def test_under_autocast_it_follows_its_dense_layer(self, case: Case) -> None:
        layer, x = case.make_layer(torch.float32), case.make_input(3, dtype=torch.float32)
        dense = layer.to_dense()
        for execution in layer.executions:
            layer.execution = execution
            with torch.autocast("cpu", torch.bfloat16):
                y, expected = layer(x), dense(x)
            assert y.dtype == expected.dtype
            assert error(y, expected) < 2e-2
            y.sum().backward()
            assert {p.grad.dtype for p in layer.parameters() if p.requires_grad} == {torch.float32}

    def test_it_goes_through_the_meta_device(self, case: Case) -> None:
        x = case.make_input(3)
        layer = case.factorize(case.make_dense().to("meta"))
        assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
        assert layer(x.to("meta")).shape == case.make_dense()(x).shape
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))  # what empty memory may hold
        layer.reset_parameters()
        assert 0 < layer(x).std() < float("inf")

    def test_functional_call_takes_other_parameters(self, case: Case) -> None:
        layer, other, x = case.make_layer(), case.make_layer(), case.make_input(3)
        for parameter in other.parameters():
            parameter.data += torch.randn_like(parameter)
        y = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
        assert error(y, other(x)) == 0
        assert error(y, layer(x)) > 0.1

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    def test_what_is_frozen_stays_frozen(self, case: Case, frozen: str) -> None:
        dense = case.make_dense().eval()
        for name, parameter in dense.named_parameters():
            parameter.requires_grad_(name != frozen)
        back = (layer := case.factorize(dense)).to_dense()
        assert not any(
            layer.get_parameter(name).requires_grad for name in {*layer.format.frozen} & {*layer.format.cores}
        )
        trained = [layer.get_parameter(name) for name in layer.format.cores if name not in layer.format.frozen]
        trains = [*(factor.requires_grad for factor in trained), back.weight.requires_grad]
        assert trains == [frozen != "weight"] * len(trains)
        if layer.bias is not None:
            assert layer.bias.requires_grad == back.bias.requires_grad == (frozen != "bias")
        assert not layer.training
