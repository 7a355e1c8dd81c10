from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import factorized as fz
from factorized.integrations.transformers import FactorizedTrainerMixin, resize_token_embeddings
from tests.models.zoo import BERT, LLAMA, LLAMA_TIED, VOCABULARY, logits

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # accelerate, without a GPU
TOKENS = torch.randint(3, VOCABULARY, (16, 9), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": row, "labels": row} for row in TOKENS]


def model() -> Any:
    return fz.factorize(LLAMA_TIED.fresh(), ratio=0.6, keep_first_and_last=False)


def arguments(folder: Path, **settings: Any) -> transformers.TrainingArguments:
    standard = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 0.05,
        "weight_decay": 0.1,
        "lr_scheduler_type": "constant",
        "save_steps": 3,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "optim": "sgd",
    }
    return transformers.TrainingArguments(str(folder), **(standard | settings))


class Trainer(FactorizedTrainerMixin, transformers.Trainer):
    frobenius_decay = 0.5


class FlambeTrainer(FactorizedTrainerMixin, transformers.Trainer):
    frobenius_decay = 0.5
    optimizer_name = "flambe"


def by_hand(groups_of: Any, optimizer_of: Any) -> Any:
    """Return the model after the steps that the trainer takes, in a loop of our own."""
    net = model().train()
    groups = groups_of(net)
    optimizer = optimizer_of(net, groups)
    torch.manual_seed(42)
    order = [int(i) for i in torch.randperm(16, generator=torch.Generator().manual_seed(7))]
    for step in range(6):
        rows = order[4 * (step % 4) : 4 * (step % 4) + 4]
        optimizer.zero_grad()
        net(input_ids=TOKENS[rows], labels=TOKENS[rows]).loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net


class InOrder(torch.utils.data.Sampler[int]):
    """The rows in one order, every epoch."""

    def __iter__(self) -> Any:
        return iter(int(i) for i in torch.randperm(16, generator=torch.Generator().manual_seed(7)))

    def __len__(self) -> int:
        return 16


def trained(cls: Any, folder: Path, **settings: Any) -> Any:
    trainer = cls(model(), arguments(folder, **settings), train_dataset=DATA)
    trainer._get_train_sampler = lambda *given: InOrder()
    trainer.train()
    return trainer


def same(a: nn.Module, b: nn.Module) -> None:
    state = b.state_dict()
    for name, tensor in a.state_dict().items():
        torch.testing.assert_close(tensor, state[name], msg=name)


def test_the_trainer_does_what_frobenius_decay_by_hand_does(tmp_path: Path) -> None:
    def with_decay(net: nn.Module, groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(groups, lr=0.05)
        fz.FrobeniusDecay(net, 0.5).attach(optimizer)
        return optimizer

    trainer = trained(Trainer, tmp_path)
    same(trainer.model, by_hand(lambda net: fz.parameter_groups(net, 0.1), with_decay))
    without = by_hand(lambda net: fz.parameter_groups(net, 0.1), lambda net, groups: torch.optim.SGD(groups, lr=0.05))
    assert not torch.allclose(without.lm_head.U, trainer.model.lm_head.U)


def test_flambe_is_chosen_by_name(tmp_path: Path) -> None:
    trainer = trained(FlambeTrainer, tmp_path)
    assert type(trainer.optimizer.optimizer) is fz.Flambe
    assert trainer.optimizer.optimizer.max_grad_norm is None  # the trainer clips, at its own norm or not at all
    assert trainer.decay is None

    def flambe(net: nn.Module, groups: Any) -> torch.optim.Optimizer:
        return fz.Flambe(groups, net, lr=0.05, eps=1e-8, weight_decay=0.1, frobenius_decay=0.5, max_grad_norm=None)

    same(trainer.model, by_hand(lambda net: fz.parameter_groups(net, 0.1), flambe))


def test_under_adamw_the_decay_is_decoupled(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path, optim="adamw_torch")
    assert trainer.decay is not None
    assert trainer.decay.decoupled

    def decoupled(net: nn.Module, groups: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        fz.decoupled_frobenius(optimizer, net, 0.5)
        return optimizer

    same(trainer.model, by_hand(lambda net: fz.parameter_groups(net, 0.1), decoupled))


@pytest.mark.parametrize(("name", "decoupled"), [("adafactor", True), ("rmsprop", True), ("sgd", False)])
def test_the_decay_is_decoupled_where_the_optimizer_rescales_gradients(
    name: str, decoupled: bool, tmp_path: Path
) -> None:
    trainer = Trainer(model(), arguments(tmp_path, optim=name), train_dataset=DATA)
    trainer.create_optimizer()  # for "adafactor" that of transformers, not torch's
    assert trainer.decay is not None
    assert trainer.decay.decoupled is decoupled


@pytest.mark.parametrize("optimizer_name", [None, "flambe"])
@pytest.mark.parametrize(
    ("strength", "ordinary"),
    [
        (0.5, {"query", "key"}),
        ({"linear": 0.5}, {"query", "key", "value", "dense"}),
        ({"linear": 0.5, "ov": 0.5, "qk": 0}, {"query", "key"}),
        ({"qk": 0.5}, {"value", "dense"}),
        ({"ov": 0.5, "qk": 0.5}, set()),
    ],
)
def test_weights_of_attention_are_decayed_as_products_or_as_ordinary_ones(
    strength: Any, ordinary: set[str], optimizer_name: Any, tmp_path: Path
) -> None:
    settings = {"frobenius_decay": strength, "optimizer_name": optimizer_name}
    cls: Any = type("Decaying", (FactorizedTrainerMixin, transformers.Trainer), settings)
    net: Any = fz.factorize(BERT.fresh(), rank=2, include=["*intermediate*"])
    optimizer = cls(net, arguments(tmp_path), train_dataset=DATA).create_optimizer()
    attention = net.bert.encoder.layer[0].attention
    held = {name: getattr(attention.self, name).weight for name in ("query", "key", "value")}
    held["dense"] = attention.output.dense.weight
    decayed = {p for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, weight in held.items() if weight in decayed} == ordinary


def test_without_a_strength_products_are_decayed_by_the_weight_decay_of_the_arguments(tmp_path: Path) -> None:
    class Plain(FactorizedTrainerMixin, transformers.Trainer):
        pass

    trainer = Plain(model(), arguments(tmp_path), train_dataset=DATA)
    trainer.create_optimizer()
    assert trainer.decay is not None
    assert trainer.decay.strength == 0.1


def test_a_checkpoint_of_the_trainer_opens_by_from_pretrained(tmp_path: Path) -> None:
    trainer = trained(Trainer, tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-6", "final"):
        for cls in (transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM):
            loaded = fz.from_pretrained(cls, tmp_path / folder)
            assert type(loaded) is transformers.LlamaForCausalLM
            assert not loaded.training
            assert loaded.lm_head.U is loaded.model.embed_tokens.U
            state = loaded.state_dict()
            assert all(torch.equal(tensor, state[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=2.0**127)], ids=["", "skips"])
def test_a_run_that_is_resumed_ends_where_one_without_a_break_does(tmp_path: Path, scaler: Any) -> None:
    class Scheduled(FactorizedTrainerMixin, transformers.Trainer):
        frobenius_decay = staticmethod(lambda step: 0.1 * step)  # type: ignore[assignment]

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.accelerator.scaler = copy.deepcopy(scaler)  # as with fp16 on a GPU
            return super().create_optimizer(model)

    whole = trained(Scheduled, tmp_path)
    assert whole.decay.steps == 6 if scaler is None else 0 < whole.decay.steps < 6
    again = Scheduled(model(), arguments(tmp_path), train_dataset=DATA)
    again._get_train_sampler = lambda *given: InOrder()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.decay.steps == whole.decay.steps
    same(again.model, whole.model)


def test_an_optimizer_that_is_given_is_decayed_too(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.SGD(fz.parameter_groups(net, 0.1), lr=0.05)
    trainer = Trainer(net, arguments(tmp_path), train_dataset=DATA, optimizers=(optimizer, None))
    trainer.train()
    assert trainer.decay is not None
    assert trainer.decay.steps == 6


@pytest.mark.parametrize("cls", [Trainer, FlambeTrainer])
def test_with_model_init_every_run_decays_its_own_model(cls: Any, tmp_path: Path) -> None:
    trainer = cls(args=arguments(tmp_path), model_init=model, train_dataset=DATA)
    trainer.train()
    first = trainer.model
    trainer.train()  # as hyperparameter_search does
    assert trainer.model is not first
    same(trainer.model, first)


@pytest.mark.parametrize("cls", [Trainer, FlambeTrainer])
def test_a_trainer_that_trains_on_decays_once(cls: Any, tmp_path: Path) -> None:
    trainer = trained(cls, tmp_path, max_steps=4)
    trainer.train()
    same(trainer.model, trained(cls, tmp_path, max_steps=8).model)


def test_a_wrong_optimizer_is_refused(tmp_path: Path) -> None:
    wrong = type("Wrong", (Trainer,), {"optimizer_name": "adam"})
    with pytest.raises(ValueError, match="optimizer_name must be \"flambe\" or None, got 'adam'"):
        wrong(model(), arguments(tmp_path), train_dataset=DATA).create_optimizer()
    own = (torch.optim.SGD, {"params": [], "lr": 0.1})
    trainer = Trainer(model(), arguments(tmp_path), train_dataset=DATA, optimizer_cls_and_kwargs=own)
    with pytest.raises(ValueError, match="chooses its parameters itself, so that factors cannot be excluded"):
        trainer.create_optimizer()


def test_weights_in_several_files_and_a_plan_are_what_a_hub_holds(tmp_path: Path) -> None:
    net = model().eval()
    net.save_pretrained(tmp_path, max_shard_size="8KB")
    fz.save_plan(net, tmp_path)
    assert {path.name for path in tmp_path.glob("*.json")} >= {"config.json", "plan.json"}
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = fz.from_pretrained(transformers.LlamaForCausalLM, tmp_path, dtype=torch.float32)
    assert torch.equal(logits(loaded, LLAMA_TIED.inputs()), logits(net, LLAMA_TIED.inputs()))


def test_a_plan_that_does_not_fit_the_weights_is_refused(tmp_path: Path) -> None:
    net = model()
    net.save_pretrained(tmp_path)
    fz.save_plan(fz.factorize(LLAMA_TIED.fresh(), rank=3, include=["*mlp*"]), tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its plan\.json: missing keys: .*Save the model again"):
        fz.from_pretrained(transformers.LlamaForCausalLM, tmp_path)


def test_a_dense_model_trained_for_comparison_is_saved_without_a_plan(tmp_path: Path) -> None:
    Trainer(LLAMA_TIED.fresh(), arguments(tmp_path, max_steps=1, save_steps=1), train_dataset=DATA).train()
    assert not (tmp_path / "checkpoint-1/plan.json").exists()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")


def test_a_dense_model_without_a_product_is_trained_as_by_the_trainer_of_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)
    trained = []
    for cls in (Trainer, transformers.Trainer):
        torch.manual_seed(0)
        net = transformers.Qwen2ForCausalLM(config)
        cls(net, arguments(tmp_path, max_steps=2), train_dataset=DATA).train()
        trained.append(net)
    same(*trained)


def test_frozen_products_beside_other_parameters_that_are_trained_are_not_decayed(tmp_path: Path) -> None:
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("norm" in name)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    trainer = Trainer(net, arguments(tmp_path, max_steps=2), train_dataset=DATA)
    trainer.train()
    assert trainer.decay is None
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) != ("norm" in name), name


def test_weights_of_transformers_are_not_for_load_and_a_new_save_takes_their_place(tmp_path: Path) -> None:
    net = model().eval()
    net.save_pretrained(tmp_path)
    fz.save_plan(net, tmp_path)
    with pytest.raises(ValueError, match=r"were written by transformers; use fz\.from_pretrained"):
        fz.load(tmp_path, LLAMA_TIED.fresh())
    fz.save_pretrained(net, tmp_path)
    weights = json.loads((tmp_path / "plan.json").read_text())["weights"]
    assert (tmp_path / weights).is_file()
    assert (tmp_path / "model.safetensors").is_file()  # not ours to delete
    fz.save_plan(net, tmp_path)
    assert not (tmp_path / weights).exists()
    assert isinstance(fz.from_pretrained(type(net), tmp_path), transformers.LlamaForCausalLM)


@pytest.mark.parametrize("species", [LLAMA_TIED, BERT], ids=lambda species: species.name)
@pytest.mark.parametrize("depth", [0, 1])
@torch.no_grad()
def test_tied_embeddings_grow_and_shrink_together(species: Any, depth: int) -> None:
    net = species.fresh(torch.float64).eval()
    dense = species.fresh(torch.float64).eval()
    scheme = fz.LowRank() if depth == 0 else fz.Overcomplete("deep")
    fz.factorize(net, scheme, **({"ratio": 0.6} if depth == 0 else {"init": "spectral"}), keep_first_and_last=False)
    embedding, head = (net.get_submodule(name) for name in species.tied)
    before, expected = embedding.weight.clone(), logits(net, species.inputs())
    for count in (VOCABULARY + 7, VOCABULARY - 5):
        resize_token_embeddings(net, count)
        dense.resize_token_embeddings(count)
        embedding, head = (net.get_submodule(name) for name in species.tied)
        assert embedding.U is head.U
        assert net.config.vocab_size == embedding.num_embeddings == head.out_features == count
        kept = min(count, VOCABULARY)
        torch.testing.assert_close(embedding.weight[:kept], before[:kept])
        assert {name: t.shape for name, t in fz.compose(net).state_dict().items()} == {
            name: t.shape for name, t in dense.state_dict().items()
        }
        if count > VOCABULARY:
            torch.testing.assert_close(logits(net, species.inputs())[..., :VOCABULARY], expected)


def test_tokens_are_padded_to_a_multiple_and_drawn_as_asked() -> None:
    net = model()
    torch.manual_seed(3)
    embedding = resize_token_embeddings(net, VOCABULARY + 1, pad_to_multiple_of=16, mean_resizing=False)
    assert embedding.num_embeddings == 96
    assert embedding.U.requires_grad
    drawn = embedding.weight[VOCABULARY:].detach()
    assert 0.05 < drawn.std() < 0.25  # initializer_range is 0.2, less what lies outside of the span
    assert resize_token_embeddings(net) is embedding


def test_rows_of_a_dense_head_beside_a_factorized_embedding_are_drawn_as_asked() -> None:
    net = fz.factorize(LLAMA.fresh(), rank=4, include=["*embed_tokens"], keep_first_and_last=False)
    resize_token_embeddings(net, VOCABULARY + 16, mean_resizing=False)
    assert net.lm_head.weight[VOCABULARY:].std(dim=0).min() > 0.05  # around the mean, they would be nearly the same


class Table(nn.Embedding):
    """A table that computes what a plain one does."""


def test_resized_embeddings_keep_their_settings_and_the_class_of_the_dense_layer() -> None:
    net = LLAMA_TIED.fresh()
    net.model.embed_tokens.__class__ = Table
    fz.factorize(net, rank=4, include=["*embed_tokens", "lm_head"], keep_first_and_last=False)
    fz.drop_connect(net, 0.25)
    embedding = resize_token_embeddings(net, VOCABULARY + 1)
    assert embedding.drop_connect == 0.25
    assert type(fz.compose(net).model.embed_tokens) is Table


def test_a_format_without_rows_says_what_to_do() -> None:
    net = LLAMA_TIED.fresh()
    with pytest.warns(UserWarning, match=r"model\.embed_tokens: the row of padding_idx is zero"):
        fz.factorize(net, fz.Kronecker(), rank=1, include=["*embed_tokens", "lm_head"], keep_first_and_last=False)
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens: kronecker has no core with a row per token; call fz\.compose"
    ):
        resize_token_embeddings(net, VOCABULARY + 1)


def test_attaching_after_accelerate_prepared_the_optimizer_works() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    results = []
    for wrapped in (True, False):
        net = model()
        optimizer = torch.optim.SGD(fz.parameter_groups(net, 0.1), lr=0.05)
        prepared, outer = accelerator.prepare(net, optimizer) if wrapped else (net, optimizer)
        decay = fz.FrobeniusDecay(prepared, 0.5).attach(outer)
        loss = prepared(input_ids=TOKENS[:4], labels=TOKENS[:4]).loss
        accelerator.backward(loss) if wrapped else loss.backward()
        outer.step()
        assert decay.steps == 1
        results.append(net)
    same(*results)


def test_the_integration_is_imported_without_transformers() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import factorized.integrations.transformers as t; print(t.Trainer)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "<class 'object'>\n"
