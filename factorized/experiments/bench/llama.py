"""The training step of a Llama with random weights: dense, and its feed-forward layers at a rank, with decay or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from factorized.decay.frobenius import FrobeniusDecay
from factorized.decay.groups import parameter_groups
from factorized.experiments.bench.session import Session, Way
from factorized.experiments.data.extras import need
from factorized.integrations.masks import skip_masks
from factorized.nn.running import count_parameters
from factorized.surgery.factorize import factorize

STRENGTH = 1e-4


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of the model and of its batch; by default 445 M parameters, for a GPU."""

    layers: int = 8
    width: int = 2048
    feed_forward: int = 5632
    vocabulary: int = 8192
    rank: int = 512
    batch: int = 8
    length: int = 1024


ON_A_CPU = LlamaSizes(layers=2, width=512, feed_forward=1408, vocabulary=1024, rank=128, batch=2, length=128)


def train_llama(session: Session, sizes: LlamaSizes | None = None) -> None:
    """Time the training step with AdamW: dense, at a rank, and at that rank with Frobenius decay; on a GPU compiled."""
    sizes = sizes or (LlamaSizes() if session.is_cuda else ON_A_CPU)
    try:
        need("transformers", "transformers", "the Llama", "text")
    except ModuleNotFoundError as error:
        session.skip("Llama", str(error))
        return

    def make(rank: int | None, decayed: bool) -> Way:
        model = build_llama(sizes, rank, session.device)
        run = torch.compile(model, dynamic=False) if session.is_cuda else model
        return Way(llama_step(model, run, sizes, decayed), {"parameters": count_parameters(model), "rank": rank})

    low = f"feed-forward at rank {sizes.rank}"
    session.compare(
        f"Llama, training step, {sizes.batch}×{sizes.length} tokens",
        {
            "dense": partial(make, None, False),
            low: partial(make, sizes.rank, False),
            f"{low}, Frobenius decay": partial(make, sizes.rank, True),
        },
    )


def build_llama(sizes: LlamaSizes, rank: int | None, device: torch.device) -> nn.Module:
    """Return the model with random weights, its feed-forward layers dense or at a rank; compiled, it has no mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.width // 64,
        max_position_embeddings=sizes.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with device:
        model: nn.Module = LlamaForCausalLM(config)
    model = model if rank is None else factorize(model, rank=rank, include=["*.mlp.*"], init="kaiming")
    skip_masks(model, {"input_ids": torch.zeros(1, sizes.length, dtype=torch.long, device=device)})
    return model


def llama_step(model: nn.Module, run: Callable[..., Any], sizes: LlamaSizes, decayed: bool) -> Callable[[], object]:
    """Return a training step on a fixed batch, in bf16 on a GPU; the decay acts on the products alone."""
    device = next(model.parameters()).device
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length), device=device)
    groups = parameter_groups(model, 0.1) if decayed else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
    if decayed:
        FrobeniusDecay(model, {"linear": STRENGTH}, decoupled=True).attach(optimizer)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
