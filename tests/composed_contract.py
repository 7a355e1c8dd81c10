"""What every layer with a composed weight has to do, whatever its factors are."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

Test = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A dense layer, how to factorize it, and what to feed it."""

    name: str
    factorized: type[Any]
    dense: Callable[[], nn.Module]
    rank: Any
    input: Callable[[tuple[int, ...]], Tensor]  # leading dimensions, none for a single example, to an input
    options: Mapping[str, Any] = field(default_factory=dict)  # of from_dense: kind, depth, execution
    thorough: bool = False
    inductor: bool = False
    compiles: bool = True  # False where torch cannot compile the dense layer either
    exact: bool = True  # False where no rank gives back every dense layer

    def make_dense(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        return self.dense().to(dtype)

    def factorize(self, dense: nn.Module, rank: Any = None, init: Any = "spectral") -> Any:
        return self.factorized.from_dense(dense, rank or self.rank, init, **self.options)

    def make_layer(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return a layer none of whose parameters is special: the inner matrices are no identities."""
        layer = self.factorize(self.make_dense(dtype))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return layer

    def make_input(self, *leading: int, dtype: torch.dtype = torch.float64) -> Tensor:
        torch.manual_seed(1)
        x = self.input(leading)
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x


def only(flag: str) -> Callable[[Test], Test]:
    """Run a test of the contract for the cases with this flag alone."""

    def mark(test: Test) -> Test:
        test.only = flag  # type: ignore[attr-defined]
        return test

    return mark


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative distance of two tensors of one shape."""
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def gradients(run: Callable[[Tensor], Tensor], x: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients, all dense, of a sum in which no two outputs weigh the same."""
    y = run(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return tuple(gradient.to_dense() for gradient in torch.autograd.grad((y * weights).sum(), leaves))


def trained_like(weight: Tensor) -> Tensor:
    """Give a fresh weight what training does: positions of unlike size, and a large smooth part of rank one."""
    ramp = torch.linspace(0.1, 3, weight.shape[-1], dtype=weight.dtype)
    rows = torch.linspace(0, 2, weight.shape[0], dtype=weight.dtype).cos()
    columns = torch.linspace(0, 3, weight[0].numel(), dtype=weight.dtype).sin()
    return weight * ramp + torch.outer(rows, columns).view_as(weight)


class ComposedContract:
    """The tests every layer with a composed weight passes; what depends on its factors is the subclass's."""

    cases: ClassVar[Sequence[Case]]

    def full_rank(self, case: Case) -> Any:
        """Return the rank at which the layer can be any dense one."""
        raise NotImplementedError

    def parameter_names(self, case: Case) -> list[str]:
        """Return the names of the factors in the state dict."""
        raise NotImplementedError

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
    def test_it_computes_what_its_dense_layer_does(self, case: Case, dtype: torch.dtype, tolerance: float) -> None:
        layer = case.make_layer(dtype)
        for leading in [(3,), (1,), ()]:
            x = case.make_input(*leading, dtype=dtype)
            assert error(layer(x), layer.to_dense()(x)) < tolerance
        assert error(layer(input=x), layer(x)) == 0  # named as torch names it

    def test_its_gradients_are_those_of_its_dense_layer(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        dense = layer.to_dense()
        shared = [x] if x.requires_grad else []
        biases = [[module.bias] if layer.bias is not None else [] for module in (layer, dense)]
        *rest, weight_gradient = gradients(dense, x, [*shared, *biases[1], dense.weight])
        through_weight = torch.autograd.grad(layer.weight, layer.factors, weight_gradient)
        actual = gradients(layer, x, [*shared, *biases[0], *layer.factors])
        for gradient, expected in zip(actual, [*rest, *through_weight], strict=True):
            assert error(gradient, expected) < 1e-11

    @only("exact")
    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
    def test_at_full_rank_it_starts_as_the_dense_layer(self, case: Case, dtype: torch.dtype, tolerance: float) -> None:
        dense, x = case.make_dense(dtype), case.make_input(3, dtype=dtype)
        for weight in (dense.weight.detach(), trained_like(dense.weight.detach())):
            dense.weight = nn.Parameter(weight)
            expected = dense(x)
            largest = (case.factorize(dense, self.full_rank(case))(x) - expected).abs().max() / expected.abs().max()
            assert largest < tolerance

    def test_its_weight_has_the_dense_shape_and_trains_every_factor(self, case: Case) -> None:
        layer = case.make_layer()
        assert layer.weight.shape == case.make_dense().weight.shape
        for gradient in torch.autograd.grad(layer.weight.square().sum(), layer.factors):
            assert gradient.abs().max() > 0

    def test_its_dense_layer_keeps_every_setting_and_shares_nothing(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        dense, before = layer.to_dense(), layer(x)
        assert repr(dense) == repr(case.make_dense())
        assert all(parameter.is_contiguous() for parameter in dense.parameters())
        with torch.no_grad():
            for parameter in dense.parameters():
                parameter.zero_()
        assert error(layer(x), before) == 0

    @only("exact")
    @pytest.mark.parametrize(
        ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
    )
    def test_its_dtype_survives_the_way_there_and_back(self, case: Case, dtype: torch.dtype, tolerance: float) -> None:
        dense = case.make_dense(dtype)
        layer = case.factorize(dense, self.full_rank(case))
        back = layer.to_dense()
        assert {parameter.dtype for parameter in (*layer.parameters(), *back.parameters())} == {dtype}
        assert error(back.weight, dense.weight) < tolerance
        assert layer(case.make_input(3, dtype=dtype)).dtype == dtype

    def test_its_state_dict_loads_into_a_fresh_layer(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        state = layer.state_dict()
        biases = ["bias"] if layer.bias is not None else []
        assert sorted(state) == sorted([*self.parameter_names(case), *biases])
        fresh = case.factorize(case.make_dense(), init=None)
        fresh.load_state_dict(state, strict=True)
        assert error(fresh(x), layer(x)) == 0

    def test_a_deepcopy_is_equal_and_independent(self, case: Case) -> None:
        layer, x = case.make_layer(), case.make_input(3)
        copy, before = deepcopy(layer), layer(x)
        assert error(copy(x), before) == 0
        with torch.no_grad():
            for parameter in copy.parameters():
                parameter.zero_()
        assert error(layer(x), before) == 0

    def test_pickling_keeps_it_as_it_is(self, case: Case) -> None:
        layer, x = case.make_layer().eval(), case.make_input(3)
        loaded = pickle.loads(pickle.dumps(layer))
        assert repr(loaded) == repr(layer)
        assert not loaded.training
        assert error(loaded(x), layer(x)) == 0

    @only("compiles")
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's, of its own tracing
    def test_it_compiles_whole(self, case: Case) -> None:
        self.check_compiled(case, "aot_eager", 1e-12)

    @only("inductor")
    @pytest.mark.nightly
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's, inside inductor
    def test_it_compiles_to_native_code(self, case: Case) -> None:
        self.check_compiled(case, "inductor", 1e-10)

    def check_compiled(self, case: Case, backend: str, tolerance: float) -> None:
        torch._dynamo.reset()
        layer, x = case.make_layer(), case.make_input(3)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        leaves = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
        assert error(compiled(x), layer(x)) < tolerance
        for actual, expected in zip(gradients(compiled, x, leaves), gradients(layer, x, leaves), strict=True):
            assert error(actual, expected) < tolerance

    @only("thorough")
    def test_an_exported_program_takes_another_batch_size(self, case: Case) -> None:
        layer, x, other = case.make_layer(), case.make_input(3), case.make_input(5)
        batch = ({0: torch.export.Dim.DYNAMIC},)
        program = torch.export.export(layer, (x,), dynamic_shapes=batch).module()
        assert error(program(other), layer(other)) < 1e-12

    @only("thorough")
    @pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")  # torch's, in its exporter
    def test_onnxruntime_computes_the_same(self, case: Case) -> None:
        import onnxruntime

        layer = case.make_layer(torch.float32).eval()
        x, other = (case.make_input(n, dtype=torch.float32).detach() for n in (3, 5))
        batch = ({0: torch.export.Dim.DYNAMIC},)
        program = torch.onnx.export(layer, (x,), dynamo=True, dynamic_shapes=batch, verbose=False)
        stored = io.BytesIO()
        program.save(stored)
        session = onnxruntime.InferenceSession(stored.getvalue(), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
        assert error(torch.from_numpy(y), layer(other)) < 1e-4

    def test_under_autocast_it_follows_its_dense_layer(self, case: Case) -> None:
        layer, x = case.make_layer(torch.float32), case.make_input(3, dtype=torch.float32)
        dense = layer.to_dense()
        with torch.autocast("cpu", torch.bfloat16):
            y, expected = layer(x), dense(x)
        assert y.dtype == expected.dtype
        assert error(y, expected) < 2e-2
        y.sum().backward()
        assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}

    def test_it_goes_through_the_meta_device(self, case: Case) -> None:
        x = case.make_input(3)
        layer = case.factorize(case.make_dense().to("meta"))
        assert {parameter.device.type for parameter in layer.parameters()} == {"meta"}
        assert layer(x.to("meta")).shape == case.make_dense()(x).shape
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.constant_(parameter, float("nan"))  # what empty memory may hold
        layer.reset_parameters()
        assert layer(x).isfinite().all()
        assert layer(x).std() > 0

    @only("exact")
    def test_a_default_device_does_not_misplace_its_factors(self, case: Case) -> None:
        dense = case.make_dense()
        with torch.device("meta"):
            layer = case.factorize(dense, self.full_rank(case))
        assert error(layer.weight, dense.weight) < 1e-12

    def test_functional_call_takes_other_parameters(self, case: Case) -> None:
        layer, other, x = case.make_layer(), case.make_layer(), case.make_input(3)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += torch.randn_like(parameter)
        y = torch.func.functional_call(layer, dict(other.named_parameters()), (x,))
        assert error(y, other(x)) == 0
        assert error(y, layer(x)) > 0.1

    @pytest.mark.parametrize("frozen", ["weight", "bias"])
    @pytest.mark.parametrize("training", [True, False])
    def test_what_is_frozen_stays_frozen(self, case: Case, frozen: str, training: bool) -> None:
        dense = case.make_dense().train(training)
        for name, parameter in dense.named_parameters():
            parameter.requires_grad_(name != frozen)
        layer, x = case.factorize(dense), case.make_input(3)
        back = layer.to_dense()
        assert [factor.requires_grad for factor in layer.factors] == [frozen != "weight"] * len(layer.factors)
        assert back.weight.requires_grad == (frozen != "weight")
        if layer.bias is not None:
            assert layer.bias.requires_grad == back.bias.requires_grad == (frozen != "bias")
        assert layer.training == back.training == training
        if x.requires_grad:
            assert error(*(gradients(module, x, [x])[0] for module in (layer, back))) < 1e-11
