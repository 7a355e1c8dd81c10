"""Small models made on the spot, the inputs they take, and a way to make their weights look trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"

VOCABULARY = 80
CLASSES = 10


@dataclass(frozen=True)
class Species:
    """One kind of model: how to make it, from the current random state, and what it takes."""

    name: str
    make: Callable[[], nn.Module]
    takes: str  # "images" or "tokens"
    tied: tuple[str, str] | None = None  # two modules that share their weight

    def fresh(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """Return a newly drawn model in training mode."""
        torch.manual_seed(seed)
        return self.make().to(dtype).train()

    def trained(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """Return a model after a few steps on random data, with structure in its weights that training would leave."""
        model = self.fresh(dtype, seed)
        train(model, self, steps=3)
        add_structure(model)
        return model

    def inputs(self, dtype: torch.dtype = torch.float32, seed: int = 1, batch: int = 6) -> Tensor:
        """Return a batch for the model."""
        generator = torch.Generator().manual_seed(seed)
        if self.takes == "images":
            return torch.randn(batch, 3, 12, 12, generator=generator, dtype=torch.float64).to(dtype)
        return torch.randint(0, VOCABULARY, (batch, 9), generator=generator)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return what ``model`` computes as one tensor, with the random state that dropout sees always the same."""
    torch.manual_seed(0)
    output = model(x)
    return output if isinstance(output, Tensor) else output.logits


def train(model: nn.Module, species: Species, steps: int, lr: float = 0.02) -> list[float]:
    """Take SGD steps towards random targets; return the losses."""
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in range(steps):
        scores = logits(model, species.inputs(dtype, seed=100 + step)).flatten(0, -2)
        generator = torch.Generator().manual_seed(step)
        targets = torch.randint(0, scores.shape[-1], (scores.shape[0],), generator=generator)
        loss = F.cross_entropy(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    return losses


@torch.no_grad()
def add_structure(model: nn.Module, seed: int = 7) -> None:
    """Add to every weight what independent draws never show: strong directions, dead rows and rows of other scales."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            continue
        matrix = parameter.flatten(1)
        m, n = matrix.shape
        left = torch.randn(m, 2, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 0.3])
        right = torch.randn(2, n, generator=generator, dtype=torch.float64)
        scale = torch.linspace(0.2, 1.5, m, dtype=torch.float64).unsqueeze(1)
        changed = (matrix.double() + 0.5 * matrix.double().std() * left @ right) * scale
        if m != VOCABULARY:  # a token without a vector has no direction to normalize
            changed[m // 2] = 0
        parameter.copy_(changed.to(parameter.dtype).view_as(parameter))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(o)
        self.conv2 = nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(o)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A CIFAR ResNet with one block per stage."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2))
        self.layer3 = nn.Sequential(BasicBlock(2 * width, 4 * width, 2))
        self.linear = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def vgg() -> nn.Module:
    """Return a VGG with four convolutions and two linear layers."""
    layers: list[nn.Module] = []
    i = 3
    for o in (8, 16, 24, 24):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if o in (8, 16) else []
        i = o
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, CLASSES)]
    return nn.Sequential(*layers, *head)


class EncoderClassifier(nn.Module):
    """An embedding, ``nn.TransformerEncoder`` and a linear head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding)[:, 0])


class TiedLanguageModel(nn.Module):
    """An embedding and an output layer that share one weight, around a gated linear unit."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, VOCABULARY)
        self.decoder.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.decoder(self.norm(x + F.glu(self.mix(x.mT), dim=1).mT))


def bert() -> nn.Module:
    """Return a two-layer ``BertForMaskedLM``; its decoder shares weight and bias with other modules."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    return BertForMaskedLM(config)


def llama(tied: bool) -> nn.Module:
    """Return a two-layer ``LlamaForCausalLM`` with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


RESNET = Species("resnet", ResNet, "images")
VGG = Species("vgg", vgg, "images")
ENCODER = Species("encoder", EncoderClassifier, "tokens")
TIED = Species("tied language model", TiedLanguageModel, "tokens", ("embed", "decoder"))
BERT = Species("bert", bert, "tokens", ("bert.embeddings.word_embeddings", "cls.predictions.decoder"))
LLAMA = Species("llama", lambda: llama(tied=False), "tokens")
LLAMA_TIED = Species("tied llama", lambda: llama(tied=True), "tokens", ("model.embed_tokens", "lm_head"))
ZOO = [RESNET, VGG, ENCODER, TIED, BERT, LLAMA, LLAMA_TIED]
