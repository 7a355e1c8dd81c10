"""transformers: a mixin for its ``Trainer``, and embeddings that grow with the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from factorized.decay.forms import factor_parameters, forms, is_attention
from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.decay.guard import is_adaptive
from factorized.decay.hook import inner_optimizer
from factorized.decay.strength import Strength, check_strength, decayed_forms
from factorized.files.atomic import write_text
from factorized.files.pretrained import save_plan
from factorized.formats.format import Format
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import module_names
from factorized.optim.flambe import Flambe
from factorized.planning.schemes import read_format
from factorized.surgery.compose import is_factorized
from factorized.surgery.replace import replace_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer
else:
    Trainer = object  # the mixin comes before the real one, so this file does not need transformers

# A checkpoint's file with the steps of the decay; those of the trainer include what a gradient scaler skipped.
DECAY = "decay.json"
# Settings with which some optimizers of transformers choose parameters.
OF_THE_OPTIMIZER = {"params", "model", "optimizer_dict"}


class FactorizedTrainerMixin(Trainer):
    """Make transformers' ``Trainer`` decay the products of a factorized model, and save its plan.

    Factors get Frobenius decay instead of ordinary weight decay; the rest is decayed as in ``TrainingArguments``. Every
    folder to which the trainer saves the model holds ``plan.json``, so that ``fz.from_pretrained`` can open it.
    Factorize the model before the trainer is made. A dense one, trained for comparison, has no plan; if none of its
    attention can be read as products (see ``fz.forms``), it gets ordinary decay alone. So does a model whose factors
    are all frozen.

    Attributes:
        frobenius_decay: λ of products, as for ``fz.FrobeniusDecay``; None uses ``weight_decay`` of the arguments. Where
            it is a dict, forms of attention that it leaves out are decayed as ordinary weights. Write a schedule as a
            ``staticmethod``.
        decoupled: whether the decay shrinks factors instead of adding to gradients; None does so with optimizers that
            rescale gradients.
        optimizer_name: ``"flambe"`` trains with ``fz.Flambe``, at the arguments' learning rate, betas and epsilon; None
            uses the optimizer that the arguments name.

    Raises:
        ValueError: when the optimizer is made, if ``optimizer_name`` is unknown or ``optim`` of the arguments chooses
            its parameters itself.

    Examples:
        >>> import transformers
        >>> class Trainer(fz.integrations.FactorizedTrainerMixin, transformers.Trainer):
        ...     frobenius_decay = 0.01
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> trainer = Trainer(model, transformers.TrainingArguments("out", report_to=[], use_cpu=True))
        >>> optimizer = trainer.create_optimizer()  # train() calls it
    """

    frobenius_decay: ClassVar[Strength | None] = None
    decoupled: ClassVar[bool | None] = None
    optimizer_name: ClassVar[Literal["flambe"] | None] = None
    decay: FrobeniusDecay | None = None  # attached to the optimizer; Flambe needs none

    def create_optimizer(self, model: Any = None) -> Optimizer:
        """Make the optimizer, with factors in a group without ordinary decay, and attach the decay to it."""
        if self.optimizer_name not in (None, "flambe"):
            raise ValueError(f'optimizer_name must be "flambe" or None, got {self.optimizer_name!r}')
        decayed: Any = self.model if model is None else model
        strength = self.args.weight_decay if self.frobenius_decay is None else self.frobenius_decay
        if self.optimizer is None:  # also when train() is called again with model_init: the old decay has no part in it
            self.optimizer, self.decay = self._new_optimizer(decayed, strength), None
        inner = inner_optimizer(self.optimizer)
        factors = factor_parameters(forms(decayed))
        trained = any(factor.requires_grad for factor in factors)
        if self.decay is None and trained and not isinstance(inner, Flambe):
            decoupled = is_adaptive(inner) if self.decoupled is None else self.decoupled
            self.decay = FrobeniusDecay(decayed, strength, decoupled=decoupled).attach(self.optimizer)
        return self.optimizer

    def _new_optimizer(self, model: Any, strength: Strength) -> Optimizer:
        groups = parameter_groups(model, self.args.weight_decay, attention=_decayed_attention(model, strength))
        if self.optimizer_name == "flambe":
            return Flambe(
                groups,
                model,
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
                frobenius_decay=strength,
                max_grad_norm=None,  # the trainer clips
            )
        given = self.optimizer_cls_and_kwargs
        made, settings = self.get_optimizer_cls_and_kwargs(self.args, model) if given is None else given
        if OF_THE_OPTIMIZER & settings.keys() or not (isinstance(made, type) and issubclass(made, Optimizer)):
            raise ValueError(
                f"optim={self.args.optim!r} chooses its parameters itself, so that factors cannot be excluded from "
                "its decay; use another, or pass the trainer an optimizer: optimizers=(optimizer, None)"
            )
        return made(groups, **settings)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        model: Any = self.model
        if not is_factorized(model):
            super()._save(output_dir, state_dict)
            return
        with own_names(model):
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            save_plan(model, output_dir or str(self.args.output_dir))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.decay is not None and self.args.should_save:
            write_text(Path(output_dir) / DECAY, json.dumps(self.decay.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.decay is not None and (path := Path(checkpoint) / DECAY).is_file():
            self.decay.load_state_dict(json.loads(path.read_text()))  # a schedule continues


@contextmanager
def own_names(model: Any) -> Iterator[None]:
    """Within this context, let a model of transformers save its weights under the names that it has for them.

    Transformers saves Mixtral and others under the names in the original checkpoints. Its ``from_pretrained`` reads
    both; its ``Trainer``, when it resumes or loads the best model, passes over names that the model does not have.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        yield
        return
    saver: Any = model
    saver.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    try:
        yield
    finally:
        del saver.save_pretrained


def _decayed_attention(model: nn.Module, strength: Strength) -> list[str]:
    """Return the forms of attention that are decayed as products; the weights of the others are ordinary ones."""
    if not isinstance(strength, Mapping):
        return ["ov"]
    found = forms(model)
    check_strength(strength, found)
    return sorted({form.kind for form in decayed_forms(strength, found) if is_attention(form)})


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Give the token embeddings of a transformers model, and the layers tied to them, another number of rows.

    This is ``model.resize_token_embeddings``, which supports only plain layers, for factorized ones. Transformers draws
    the new rows; they become their best approximation in the span of the others. Returns the embedding.

    Args:
        model: a model of transformers.
        new_num_tokens: the number of rows; None keeps it.
        pad_to_multiple_of: round the number of rows up to a multiple of this.
        mean_resizing: draw new rows around the mean of the old ones, as transformers does.

    Raises:
        ValueError: the format of the embedding has no row per token; the model is not changed.

    Examples:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=100, **sizes))
        >>> model = fz.factorize(model, rank=4, include=["*word_embeddings", "*decoder"], keep_first_and_last=False)
        >>> fz.integrations.resize_token_embeddings(model, 120)
        FactorizedEmbedding(120, 32, padding_idx=0, execution=look_up, rank=4, params=608 of 3,840)
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    count = ends[0].weight.shape[0] if new_num_tokens is None else new_num_tokens
    step = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    count = -(-count // step) * step
    names = module_names(model)
    tables = {_rows(names[end][0], end) for end in ends if isinstance(end, FactorizedLayer)}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for layer in [module for module in names if isinstance(module, FactorizedLayer)]:
        if not tables.isdisjoint(layer.factors) and layer.shape.out_channels != count:
            resized = _resized(model, layer, count, mean_resizing, made)
            for name in names[layer]:
                replace_module(model, name, resized)
    given = {} if mean_resizing else {"mean_resizing": False}  # a few classes override the method without it
    embedding: nn.Module = model.resize_token_embeddings(count, **given)
    return embedding


def _rows(name: str, layer: FactorizedLayer) -> nn.Parameter:
    """Return the core whose rows are those of the weight."""
    if layer.format.row_core is None:
        raise ValueError(
            f"{name}: {layer.format.name} has no core with a row per token; call fz.compose on the model, resize "
            "it and factorize it again. Nothing was changed"
        )
    return layer.get_parameter(layer.format.row_core)


@torch.no_grad()
def _resized(
    model: Any, layer: FactorizedLayer, count: int, mean_resizing: bool, made: dict[nn.Parameter, nn.Parameter]
) -> FactorizedLayer:
    """Return ``layer`` with ``count`` rows; ``made`` holds those of the layers that share its factors."""
    format = _with_rows(layer.format, count)
    kind: Any = type(layer)
    old = layer.to_dense()
    resize = model._get_resized_embeddings if isinstance(old, nn.Embedding) else model._get_resized_lm_head
    dense = resize(old, count, mean_resizing=mean_resizing)
    new: FactorizedLayer = kind.from_dense(dense, format, init=None)
    rows = _rows("", layer)
    if rows not in made:
        # A matrix turns rows of the core into rows of the weight: the weight for a core that is the identity.
        type_ = torch.promote_types(rows.dtype, torch.float32)
        eye = torch.eye(rows.shape[1], device=rows.device, dtype=type_)
        factors = [eye if factor is rows else factor.to(type_) for factor in layer.factors]
        wide = _with_rows(format, rows.shape[1]).compose(factors)
        added = dense.weight[len(rows) :].to(type_) @ torch.linalg.pinv(wide)
        made[rows] = nn.Parameter(torch.cat([rows[:count], added.to(rows)]), rows.requires_grad)
    for holder in {name.partition(".")[0] for name in format.cores}:  # inner matrices are in a list
        setattr(new, holder, made[rows] if holder == format.row_core else getattr(layer, holder))
    layer.hand_over(new)
    return new


def _with_rows(format: Format, count: int) -> Format:
    return read_format(replace(format.shape, out_channels=count), format.to_dict())
