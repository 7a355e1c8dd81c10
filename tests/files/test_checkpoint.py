from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import factorized as fz
from factorized.version import __version__
from tests.models.unchanged import unchanged
from tests.models.zoo import LLAMA, TIED, TiedLanguageModel, logits


class Small(nn.Module):
    """A convolution, batch normalization, a grouped convolution and a shared linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, groups=2, padding="same")
        self.fc = nn.Linear(8, 8)
        self.again = self.fc
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.norm(self.first(x)).relu()).mean((2, 3))
        return self.head(self.again(self.fc(x).relu()))


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    model = Small().eval()
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked.fill_(3 + seed)
    return model


def factorized(seed: int = 0) -> nn.Module:
    return fz.factorize(small(seed), fz.Overcomplete("deep"), init="kaiming")


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert list(first) == list(second)
    for key in first:
        assert torch.equal(first[key], second[key]), key


def test_a_round_trip_keeps_every_bit_every_name_and_the_modules_of_the_fresh_model(tmp_path: Path) -> None:
    model, fresh = factorized(), small(seed=5)
    kept = fresh.norm
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, fresh)
    assert loaded is fresh
    assert loaded.norm is kept
    assert loaded.again is loaded.fc
    assert repr(loaded) == repr(model)
    assert_same_state(loaded, model)


def test_saving_leaves_the_model_alone_and_makes_the_folders(tmp_path: Path) -> None:
    model = factorized()
    with unchanged(model):
        fz.save(model, tmp_path / "deep" / "down")
    assert_same_state(fz.load(str(tmp_path / "deep" / "down"), small(seed=5)), model)


def test_the_manifest_says_which_versions_wrote_it(tmp_path: Path) -> None:
    fz.save(factorized(), tmp_path)
    manifest = json.loads((tmp_path / "plan.json").read_text())
    assert manifest["format"] == 1
    assert manifest["factorized"] == __version__
    assert manifest["torch"] == torch.__version__
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["plan.json", manifest["weights"]])


def test_a_shared_tensor_is_written_once(tmp_path: Path) -> None:
    model = fz.factorize(TIED.fresh(), rank=4, keep_first_and_last=False)
    fz.save(model, tmp_path)
    manifest = json.loads((tmp_path / "plan.json").read_text())
    with safe_open(tmp_path / manifest["weights"], framework="pt") as file:
        written = set(file.keys())
    assert manifest["aliases"] == {"decoder.U": "embed.U", "decoder.V": "embed.V"}
    assert written == set(model.state_dict()) - {"decoder.U", "decoder.V"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["the argument", "the model", "the meta model"])
def test_a_checkpoint_is_loaded_in_another_dtype(tmp_path: Path, dtype: torch.dtype, where: str) -> None:
    model = factorized()
    fz.save(model, tmp_path)
    fresh = small(seed=5).to(dtype) if where == "the model" else small(seed=5)
    fresh = fresh.to("meta") if where == "the meta model" else fresh
    loaded = fz.load(tmp_path, fresh, dtype=None if where == "the model" else dtype)
    for key, value in model.state_dict().items():
        expected = value.to(dtype) if value.is_floating_point() else value
        assert loaded.state_dict()[key].dtype == expected.dtype, key
        assert torch.equal(loaded.state_dict()[key], expected), key


def test_a_model_on_the_meta_device_becomes_real_and_stays_tied(tmp_path: Path) -> None:
    model = fz.factorize(TIED.trained(), rank=4, keep_first_and_last=False)
    fz.save(model, tmp_path)
    with torch.device("meta"):
        empty = TiedLanguageModel()
    empty.mix.weight.requires_grad_(False)
    loaded = fz.load(tmp_path, empty)
    assert loaded.embed.U is loaded.decoder.U
    assert [factor.requires_grad for factor in loaded.mix.factors] == [False, False]
    assert loaded.embed.U.requires_grad
    assert_same_state(loaded, model)
    assert torch.equal(logits(loaded, TIED.inputs()), logits(model.train(), TIED.inputs()))


def test_two_tensors_of_a_meta_model_do_not_become_one_because_the_file_has_one(tmp_path: Path) -> None:
    model = fz.factorize(TIED.fresh(), rank=4)
    fz.save(model, tmp_path)
    with torch.device("meta"):
        untied = TiedLanguageModel()
        untied.decoder = nn.Linear(32, 80)
    loaded = fz.load(tmp_path, untied)
    with torch.no_grad():
        loaded.decoder.weight.zero_()
    assert torch.equal(loaded.embed.weight, model.embed.weight)


def test_two_tensors_in_the_file_are_not_squeezed_into_one_of_the_model(tmp_path: Path) -> None:
    untied = TIED.fresh()
    untied.decoder.weight = nn.Parameter(torch.randn(80, 32))
    fz.save(fz.factorize(untied, rank=4), tmp_path)
    fresh = TIED.fresh()
    message = "embed.weight and decoder.weight are one tensor in the model and two in the checkpoint"
    with unchanged(fresh), pytest.raises(ValueError, match=message):
        fz.load(tmp_path, fresh)


@pytest.mark.parametrize("view", [lambda w: w.mT, lambda w: w[1:3], lambda w: w.view(-1), lambda w: w[1:2, 3]])
def test_a_buffer_that_views_a_weight_is_saved(tmp_path: Path, view: Callable[[Tensor], Tensor]) -> None:
    model, fresh = small(), small(seed=5)
    for each in (model, fresh):
        each.head.register_buffer("seen", view(each.head.weight.detach()))
    fz.save(fz.factorize(model, rank=2), tmp_path)
    fresh.head.seen = fresh.head.seen.clone()
    assert torch.equal(fz.load(tmp_path, fresh).head.seen, view(model.head.weight))


def test_buffers_that_torch_conjugates_or_negates_when_they_are_read_are_saved(tmp_path: Path) -> None:
    model, fresh = small(), small(seed=5)
    phase = torch.tensor([1 + 2j]).conj()
    for each in (model, fresh):
        each.head.register_buffer("phase", phase)
        each.head.register_buffer("angle", phase.imag)
    fz.save(fz.factorize(model, rank=2), tmp_path)
    fresh.head.phase, fresh.head.angle = torch.zeros(1, dtype=phase.dtype), torch.zeros(1)
    head = fz.load(tmp_path, fresh).head
    assert (head.phase.tolist(), head.angle.tolist()) == ([1 - 2j], [-2.0])


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled layer": lambda model: with_compiled(model, "fc"),
    "compiled part": lambda model: with_compiled(model, "head"),
}


def with_compiled(model: nn.Module, name: str) -> nn.Module:
    compiled = torch.compile(model.get_submodule(name), backend="eager")
    for key, module in list(model._modules.items()):
        if module is model.get_submodule(name):
            setattr(model, key, compiled)
    return model


@torch.no_grad()
@pytest.mark.parametrize("saved", WRAPPINGS)
@pytest.mark.parametrize("into", WRAPPINGS)
def test_compiled_models_are_saved_and_loaded_as_what_they_wrap(tmp_path: Path, saved: str, into: str) -> None:
    model = factorized()
    expected = model(images())
    fz.save(WRAPPINGS[saved](model), tmp_path)
    target = WRAPPINGS[into](small(seed=5))
    target(images())  # compile what is there before it is replaced
    loaded = fz.load(tmp_path, target)
    assert type(loaded) is type(target)
    torch.testing.assert_close(loaded(images()), expected)
    assert not any("_orig_mod" in entry["name"] for entry in read_plan(tmp_path)["entries"])


def test_layers_stay_tied_to_one_that_is_compiled(tmp_path: Path) -> None:
    model = fz.factorize(TIED.trained(), rank=4, keep_first_and_last=False)
    fz.save(model, tmp_path)
    loaded = fz.load(tmp_path, with_compiled(TIED.fresh(), "embed"))
    assert loaded.decoder.U is loaded.embed.U
    assert torch.equal(loaded.decoder.U, model.decoder.U)


@torch.no_grad()
def test_a_compiled_model_that_is_one_layer_is_loaded(tmp_path: Path) -> None:
    x = torch.randn(3, 6)
    layer = fz.FactorizedLinear(6, 5, 2)
    fz.save(layer, tmp_path)
    loaded = fz.load(tmp_path, torch.compile(nn.Linear(6, 5), backend="eager"))
    torch.testing.assert_close(loaded(x), layer(x))


def read_plan(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())["plan"]


def test_loading_needs_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pickle was used")

    model, fresh = factorized(), small(seed=5)
    for module, name in [(pickle, "load"), (pickle, "loads"), (pickle, "dump"), (torch, "load"), (torch, "save")]:
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    fz.save(model, tmp_path)
    assert_same_state(fz.load(tmp_path, fresh), model)


class WithExtraState(Small):
    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


class WithExtraTensor(Small):
    def get_extra_state(self) -> Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Tensor) -> None: ...


def without_a_key() -> nn.Module:
    model = factorized()
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.__delitem__("norm.bias"))
    return model


def with_a_graph() -> nn.Module:
    model = factorized()
    model.register_buffer("graph", torch.eye(4).to_sparse())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: fz.factorize(WithExtraState(), rank=2), r"_extra_state is dict; a checkpoint without pickle"),
        (lambda: fz.factorize(WithExtraTensor(), rank=2), r"state dict holds _extra_state, .*keep it in another file"),
        (without_a_key, r"state dict lacks norm.bias, because .* a state dict hook changes it"),
        (with_a_graph, r"graph is sparse \(torch.sparse_coo\).*persistent=False"),
        (lambda: fz.factorize(Small().to("meta"), rank=2), r"first.weight is on the meta device and has no values"),
        (Small, r"Small has no factorized layer; call fz.factorize first"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_a_file_is_written(
    tmp_path: Path, model: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fz.save(model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype must be a floating-point torch.dtype, .* got 'bfloat16'"),
        ({"dtype": torch.int8}, "got torch.int8"),
        ({"device": "gpu"}, "device must be one of this machine, .* got 'gpu': "),
        ({"device": 1.5}, "device must be one of this machine, .* got 1.5: "),
    ],
)
@pytest.mark.parametrize("on_meta", [False, True])
def test_a_wrong_device_or_type_is_refused_before_the_model_is_changed(
    tmp_path: Path, options: dict[str, Any], message: str, on_meta: bool
) -> None:
    fz.save(factorized(), tmp_path)
    fresh = small(seed=5).to("meta") if on_meta else small(seed=5)
    with unchanged(fresh), pytest.raises(ValueError, match=message):
        fz.load(tmp_path, fresh, **options)


def test_a_meta_model_with_buffers_that_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    fz.save(fz.factorize(LLAMA.fresh(), rank=4), tmp_path)
    with torch.device("meta"):
        empty = LLAMA.fresh()
    with unchanged(empty), pytest.raises(ValueError, match=r"model.rotary_emb.inv_freq.* would have no values"):
        fz.load(tmp_path, empty)


def test_a_factorized_model_is_not_factorized_again(tmp_path: Path) -> None:
    model = factorized()
    fz.save(model, tmp_path)
    twin = deepcopy(model)
    with unchanged(twin), pytest.raises(ValueError, match="conv is FactorizedConv2d, not Conv2d"):
        fz.load(tmp_path, twin)
