"""Text models: transformers of the sizes that a recipe names, or from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from factorized.experiments.data.extras import need
from factorized.experiments.models.hugging_face import (
    drawn_keys,
    model_folder,
    quiet,
    reading,
    refuse_factorized,
    refuse_lost,
)
from factorized.experiments.recipes.text import TextRecipe

AUTO = {
    "language": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "translation": "AutoModelForSeq2SeqLM",
    "questions": "AutoModelForQuestionAnswering",
}


def build_text_model(recipe: TextRecipe, tokenizer: Any, seed: int) -> nn.Module:
    """Return the recipe's network before factorization, drawn with ``seed``."""
    torch.manual_seed(seed)
    model: nn.Module
    if recipe.model.name:
        model = _from_folder(recipe)
    else:
        model = auto_class(recipe.task).from_config(text_config(recipe, tokenizer))
    check_vocabulary(model, tokenizer)
    return model


def _from_folder(recipe: TextRecipe) -> Any:
    """Return the trained model that a recipe names, in float32: half precision would round small updates away.

    A head that the folder has no weights for is drawn.
    """
    folder = model_folder(recipe.model.name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {recipe.model.name}: {folder / 'config.json'} is missing")
    refuse_factorized(folder)
    model, report = load_folder(recipe.task, folder, torch.float32)
    head = {key for key in report["missing_keys"] if not key.startswith(f"{model.base_model_prefix}.")}
    refuse_lost(folder, [key for key in drawn_keys(report) if key not in head])
    most = most_tokens(model)
    if most is not None and recipe.data.length > most and recipe.task != "translation":  # which cuts its sentences
        raise ValueError(
            f"data.length = {recipe.data.length} is more than the {most} tokens that {recipe.model.name} takes; ask "
            f"for {most} or less"
        )
    return model


def load_folder(task: str, folder: Path, dtype: torch.dtype | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the model in a Hugging Face folder, and transformers' report of the weights that it found.

    Without ``dtype`` it has the type of its weights. No code of the folder is run.
    """
    with quiet(), reading(folder):
        model, report = auto_class(task).from_pretrained(
            folder,
            dtype=dtype or "auto",
            ignore_mismatched_sizes=True,  # they are in the report
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if task == "language":
        _check_causal(folder, model)
    return model, report


@torch.no_grad()
def _check_causal(folder: Path, model: Any) -> None:
    """Raise if what a model predicts depends on later tokens: it would only have to copy them."""
    tokens = torch.arange(1, 9).repeat(2, 1) % len(_embeddings(model))
    tokens[1, -1] = 0
    first, second = model.eval()(input_ids=tokens).logits[:, :-1]
    rounding = max(1e-4, 4 * torch.finfo(first.dtype).eps)  # a mixture of experts may group tokens otherwise
    if (first - second).abs().max() > rounding * first.abs().max():
        raise ValueError(
            f"model hf:{folder} sees the tokens that it has to predict; if it was trained to see only those before, "
            "set is_decoder to true in its config.json, else it is no causal language model"
        )


def auto_class(task: str) -> Any:
    """Return the auto class of transformers for the models of a task."""
    return getattr(need("transformers", "transformers", f"task {task!r}", "text"), AUTO[task])


def text_outline(task: str, folder: Path) -> Any:
    """Return the model that a Hugging Face folder describes, without its weights."""
    config_class = need("transformers", "transformers", f"task {task!r}", "text").AutoConfig
    with quiet(), reading(folder), torch.device("meta"):
        config = config_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return auto_class(task).from_config(config, trust_remote_code=False)


def most_tokens(model: Any) -> int | None:
    """Return the length of the longest sequence that a model takes, by its config; None where that does not say.

    RoBERTa and its family have no use for the positions up to that of padding.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return len(module.weight) - int(module.padding_idx) - 1
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((int(value) for value in named if value is not None and value > 0), None)  # XLNet's is -1


def text_config(recipe: TextRecipe, tokenizer: Any) -> Any:
    """Return the configuration of the task's architecture: Llama, BERT or Marian."""
    transformers = need("transformers", "transformers", f"task {recipe.task!r}", "text")
    sizes, length = recipe.model, recipe.data.length
    shared = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": sizes.tied,
        "pad_token_id": tokenizer.pad_token_id,
    }
    one_stack = {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.feed_forward,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
    }
    if recipe.task == "language":
        return transformers.LlamaConfig(
            num_key_value_heads=sizes.kv_heads or sizes.heads,
            attention_dropout=sizes.dropout,
            max_position_embeddings=length,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **one_stack,
            **shared,
        )
    if recipe.task == "translation":
        return transformers.MarianConfig(
            d_model=sizes.hidden,
            encoder_layers=sizes.layers,
            decoder_layers=sizes.layers,
            encoder_attention_heads=sizes.heads,
            decoder_attention_heads=sizes.heads,
            encoder_ffn_dim=sizes.feed_forward,
            decoder_ffn_dim=sizes.feed_forward,
            dropout=sizes.dropout,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=max(length, recipe.run.longest + 1),
            init_std=sizes.hidden**-0.5,
            eos_token_id=tokenizer.eos_token_id,
            forced_eos_token_id=None,
            decoder_start_token_id=tokenizer.pad_token_id,
            **shared,
        )
    return transformers.BertConfig(
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=sizes.dropout,
        max_position_embeddings=sizes.positions or length,
        **one_stack,
        **shared,
    )


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise if the model has fewer embeddings than the tokenizer has tokens."""
    held = len(_embeddings(model))
    if held < len(tokenizer):
        raise ValueError(
            f"the model has {held:,} embeddings and the tokenizer {len(tokenizer):,} tokens; take the tokenizer that "
            "the model was trained with, or a smaller data.vocabulary"
        )


def _embeddings(model: Any) -> Tensor:
    """Return the vectors of all tokens; Perceiver's are a parameter, and no layer."""
    table = model.get_input_embeddings()
    found: Tensor = getattr(table, "weight", table)
    return found
