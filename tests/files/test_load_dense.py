from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import factorized as fz
from factorized.formats.kernel import KernelShape, to_kernel, to_matrix
from tests.models.unchanged import unchanged
from tests.models.zoo import BERT, TIED, logits

State = dict[str, Tensor]


def dense(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=2, padding=1)]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(72, 12), nn.Linear(12, 4)).double().eval()
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(seed)
    return model


def images() -> Tensor:
    return torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def best_approximation(weight: Tensor, groups: int, rank: int) -> Tensor:
    shape = KernelShape.of(tuple(weight.shape), groups)
    U, S, Vh = torch.linalg.svd(to_matrix(weight, shape), full_matrices=False)
    S[..., rank:] = 0
    return to_kernel((U * S.unsqueeze(-2)) @ Vh, shape)


@pytest.mark.parametrize("scheme", [fz.Overcomplete("full"), fz.Overcomplete("deep"), fz.Overcomplete("wide")])
def test_at_full_rank_the_dense_model_is_reproduced(scheme: fz.Overcomplete) -> None:
    source = dense()
    model = fz.factorize(dense(seed=5), scheme, keep_first_and_last=False)
    with unchanged(source):
        assert fz.load_dense(model, source.state_dict()) is model
    torch.testing.assert_close(model(images()), source(images()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3])
def test_below_full_rank_every_weight_is_its_best_approximation(rank: int) -> None:
    source = dense()
    model = fz.load_dense(fz.factorize(dense(seed=5), rank=rank), source.state_dict())
    torch.testing.assert_close(model[2].weight, best_approximation(source[2].weight.detach(), 2, rank))
    torch.testing.assert_close(model[4].weight, best_approximation(source[4].weight.detach(), 1, rank))


def test_what_is_not_factorized_is_copied_whole() -> None:
    source = dense(seed=1)
    model = fz.load_dense(fz.factorize(dense(seed=5), rank=2), source.state_dict())
    state = source.state_dict()
    copied = {key: value for key, value in model.state_dict().items() if not key.endswith((".U", ".V"))}
    assert set(state) - set(copied) == {"2.weight", "4.weight"}
    for key, value in copied.items():
        assert torch.equal(value, state[key]), key
    assert model[1].num_batches_tracked == 1


def test_the_very_parameters_are_filled_so_that_an_optimizer_goes_on() -> None:
    model = fz.factorize(dense(seed=5), rank=2)
    parameters = list(model.parameters())
    model[4].U.requires_grad_(False)
    fz.load_dense(model, dense().state_dict())
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert not model[4].U.requires_grad


def test_inner_matrices_become_identities() -> None:
    model = fz.factorize(dense(seed=5), fz.Overcomplete("deep"))
    with torch.no_grad():
        model[4].inner[0].fill_(7)
    fz.load_dense(model, dense().state_dict())
    assert torch.equal(model[4].inner[0], torch.eye(12, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_dict_of_another_dtype_is_taken_in_the_models(dtype: torch.dtype) -> None:
    source = dense().to(dtype)
    model = fz.load_dense(fz.factorize(dense(seed=5), fz.Overcomplete("full")), source.state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(model[4].weight, source[4].weight.double(), rtol=0, atol=2 * torch.finfo(dtype).eps)


def wrapped(state: State) -> State:
    return {f"_orig_mod.{key}": value for key, value in state.items()}


def wrapped_inside(state: State) -> State:
    return {key.replace("4.", "4._orig_mod."): value for key, value in state.items()}


@pytest.mark.parametrize("names", [wrapped, wrapped_inside])
@pytest.mark.parametrize("compiled", [False, True])
def test_names_of_compiled_models_are_understood(names: Callable[[State], State], compiled: bool) -> None:
    source = dense()
    model = fz.factorize(dense(seed=5), fz.Overcomplete("full"))
    fz.load_dense(torch.compile(model, backend="eager") if compiled else model, names(source.state_dict()))
    torch.testing.assert_close(model(images()), source(images()), rtol=1e-10, atol=1e-12)


def without(*keys: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key not in keys}


def plus(**tensors: Tensor) -> Callable[[State], State]:
    return lambda state: state | {key.replace("_", ".", 1): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("2.weight"), r"the dense checkpoint does not fit the model: missing 2\.weight\. Nothing was changed"),
        (without("1.running_mean", "0.bias"), r"missing 0\.bias, 1\.running_mean\. Nothing was changed"),
        (plus(_7_weight=torch.ones(2)), r"unexpected \.7_weight\. Nothing was changed"),
        (plus(**{"4_U": torch.ones(12, 2)}), r"unexpected 4\.U\. Nothing was changed"),
        (plus(**{"4_weight": torch.ones(12, 7)}), r"4\.weight is 12x7, expected 12x72\. Nothing was changed"),
        (plus(**{"5_bias": torch.ones(3)}), r"5\.bias is 3, expected 4\. Nothing was changed"),
        (plus(**{"4_weight": torch.full((12, 72), torch.nan)}), r"4\.weight: weight holds NaN .*; nothing was changed"),
        (plus(**{"2_weight": torch.full((8, 4, 3, 3), torch.inf)}), r"2\.weight: weight holds NaN or infinite values"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: Callable[[State], State], message: str) -> None:
    model = fz.factorize(dense(seed=5), rank=2)
    with unchanged(model), pytest.raises(ValueError, match=message):
        fz.load_dense(model, change(dense().state_dict()))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dense", [dense, lambda seed=0: nn.Sequential(nn.LSTM(8, 8))], ids=["layers", "lstm"])
def test_torchs_own_loading_of_a_dense_checkpoint_names_this_function(dense: Any, strict: bool) -> None:
    model = fz.factorize(dense(), rank=2, keep_first_and_last=False)
    with pytest.raises(RuntimeError, match=r"dense weights where the model has factors; use fz\.load_dense") as caught:
        model.load_state_dict(dense(seed=1).state_dict(), strict=strict)
    assert str(caught.value).count("load_dense") == 1
    model.load_state_dict({"none": torch.zeros(8)}, strict=False)


def test_a_model_in_place_of_its_state_dict_is_refused() -> None:
    model = fz.factorize(dense(), rank=2)
    with unchanged(model), pytest.raises(ValueError, match=r"got Sequential; of a model, pass model\.state_dict\(\)"):
        fz.load_dense(model, model)  # type: ignore[arg-type]


def test_a_model_without_factorized_layers_is_refused() -> None:
    model = dense()
    with unchanged(model), pytest.raises(ValueError, match="has no factorized layer; use its own load_state_dict"):
        fz.load_dense(model, dense().state_dict())


def test_a_model_on_the_meta_device_is_refused() -> None:
    model = fz.factorize(dense().to("meta"), rank=2)
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device and cannot be filled"):
        fz.load_dense(model, dense().state_dict())


@pytest.mark.parametrize("missing", [(), ("embed.weight",), ("decoder.weight",)])
@pytest.mark.parametrize("factorized_ends", [True, False])
def test_of_tied_weights_one_name_is_enough(missing: tuple[str, ...], factorized_ends: bool) -> None:
    source = TIED.trained().eval()
    model = fz.factorize(TIED.fresh(seed=5), fz.Overcomplete("full"), keep_first_and_last=not factorized_ends).eval()
    fz.load_dense(model, without(*missing)(source.state_dict()))
    torch.testing.assert_close(logits(model, TIED.inputs()), logits(source, TIED.inputs()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factorized_ends", [True, False])
def test_of_tied_weights_no_name_is_not_enough(factorized_ends: bool) -> None:
    model = fz.factorize(TIED.fresh(seed=5), fz.Overcomplete("full"), keep_first_and_last=not factorized_ends)
    state = without("embed.weight", "decoder.weight")(TIED.fresh().state_dict())
    with unchanged(model), pytest.raises(ValueError, match=r"missing decoder\.weight, embed\.weight"):
        fz.load_dense(model, state)


def test_of_a_tied_bias_one_name_is_enough() -> None:
    source = BERT.trained().eval()
    model = fz.factorize(BERT.fresh(seed=5), fz.Overcomplete("full"), keep_first_and_last=False).eval()
    state = without("cls.predictions.decoder.bias", "cls.predictions.decoder.weight")(source.state_dict())
    fz.load_dense(model, state)
    torch.testing.assert_close(logits(model, BERT.inputs()), logits(source, BERT.inputs()), rtol=1e-3, atol=1e-3)
    assert torch.equal(model.cls.predictions.decoder.bias, source.cls.predictions.bias)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "module._orig_mod.", "module.module."])
def test_names_of_a_wrapped_model_are_accepted_whichever_wrapper_is_in_another(prefix: str) -> None:
    dense, model = two_linears(), factorized_linears()
    fz.load_dense(model, {f"{prefix}{key}": value for key, value in dense.state_dict().items()})
    assert torch.allclose(model[0].weight, dense[0].weight, atol=1e-5)
    torch.testing.assert_close(model[1].bias, dense[1].bias)


def test_an_average_of_dense_models_is_accepted() -> None:
    dense, model = two_linears(), factorized_linears()
    average = AveragedModel(dense)
    average.update_parameters(dense)
    fz.load_dense(model, average.state_dict())
    assert torch.allclose(model[0].weight, dense[0].weight, atol=1e-5)
    torch.testing.assert_close(model[1].bias, dense[1].bias)
    averaged = AveragedModel(factorized_linears())
    fz.load_dense(averaged, average.state_dict())
    assert torch.allclose(averaged.module[0].weight, dense[0].weight, atol=1e-5)
    assert averaged.n_averaged == 1


def test_an_average_of_a_wrapped_dense_model_is_accepted() -> None:
    dense, model = two_linears(), factorized_linears()
    fz.load_dense(model, AveragedModel(nn.DataParallel(dense)).state_dict())
    assert torch.allclose(model[0].weight, dense[0].weight, atol=1e-5)


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = factorized_linears()
    dense = two_linears()
    fz.load_dense(model, {f"module.{key}": value for key, value in dense.state_dict().items()})
    assert torch.allclose(model.module[0].weight, dense[0].weight, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: {"model": two_linears().state_dict(), "epoch": 3}, r"for 'model'; .* in state_dict\['model'\]"),
        (lambda: {**two_linears().state_dict(), "epoch": 3}, "got int for 'epoch'. Nothing was changed"),
        (lambda: "model.pt", r"got str; .* of a file, torch.load\(path\)"),
        (lambda: factorized_linears().state_dict(), r"holds factors \(0.U\), .* use model.load_state_dict"),
    ],
)
def test_what_is_not_a_dense_state_dict_says_what_to_pass(given: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fz.load_dense(factorized_linears(), given())


def two_linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def factorized_linears() -> nn.Sequential:
    return nn.Sequential(fz.FactorizedLinear(8, 8, 8), nn.Linear(8, 4))
