"""Text models: transformers of the sizes that a recipe names, or from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from factorized.experiments.data.extras import need
from factorized.experiments.models.hugging_face import quiet, reading, refuse_factorized
from factorized.experiments.recipes.text import TextRecipe

AUTO = {
    "language": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "translation": "AutoModelForSeq2SeqLM",
    "questions": "AutoModelForQuestionAnswering",
}


def build_text_model(recipe: TextRecipe, tokenizer: Any, seed: int) -> nn.Module:
    """Return the recipe's network before factorization, drawn with ``seed``."""
    auto = auto_class(recipe.task)
    torch.manual_seed(seed)
    model: nn.Module
    if recipe.model.name:
        folder = model_folder(recipe.model.name)
        if not (folder / "config.json").is_file():
            raise ValueError(f"model {recipe.model.name}: {folder / 'config.json'} is missing")
        refuse_factorized(folder)
        with quiet(), reading(folder):
            model = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    else:
        model = auto.from_config(text_config(recipe, tokenizer))
    check_vocabulary(model, tokenizer)
    return model


def auto_class(task: str) -> Any:
    """Return the auto class of transformers for the models of a task."""
    return getattr(need("transformers", "transformers", f"task {task!r}", "text"), AUTO[task])


def model_folder(name: str) -> Path:
    """Return the folder of a Hugging Face model that a recipe names as ``hf:FOLDER``."""
    return Path(name.removeprefix("hf:")).expanduser()


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
    held = model.get_input_embeddings().num_embeddings
    if held < len(tokenizer):
        raise ValueError(
            f"the model has {held:,} embeddings and the tokenizer {len(tokenizer):,} tokens; take the tokenizer that "
            "the model was trained with, or a smaller data.vocabulary"
        )
