"""Time the decoding of language models, token by token: dense, low rank after ``fz.lower``, and fused for a GPU.

    python -m benchmarks.decode --out benchmarks/results/decode-h200.json
    python -m benchmarks.decode llama-445m llama-wide --batch 1 --fuse --kernel BLOCK=512 --out FILE
    python -m benchmarks.decode llama-445m llama-wide --batch 1 --fuse --attention SEQUENCES=0 --parallel --out FILE
    python -m benchmarks.decode llama-445m --batch 8 --fuse --rows MOST=8 --rows MOST=8,PROGRAMS=1 --out FILE

Models are made from their sizes with random weights, in bfloat16, with a static cache of keys and values. One step
reads a token of each sequence and gives the next one; on a GPU it is compiled and one CUDA graph. Times are medians of
rounds that are interleaved over the models, in milliseconds; ``bytes`` are those of all weights, which every step
reads; ``peak_memory`` is that of torch's tensors, in bytes, without the models that came before. With SEQUENCES=0
fused layers leave attention to transformers; with MOST=8 products of several rows are not left to torch.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, StaticCache

import factorized as fz
from benchmarks.script import parser_of, write
from factorized.integrations.decoding import fuse_decoder
from factorized.nn import few_rows, one_row, one_token
from factorized.nn.running import count_parameters
from factorized.nn.timing import capture, median_milliseconds


def _llama(width: int, feed_forward: int, layers: int, heads: int, vocabulary: int = 16_384) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )


# name: the configuration of the dense model
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-445m": lambda: _llama(2048, 5632, layers=8, heads=16),
    "llama-wide": lambda: _llama(4096, 11_008, layers=4, heads=32),  # as wide as one of 7 billion parameters
    "gpt2": lambda: GPT2Config(),
    "gpt2-large": lambda: GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "tiny": lambda: _llama(64, 128, layers=2, heads=2, vocabulary=100),
}
PROMPT = 16  # tokens before the first that is timed
# names that may have other values
PRODUCTS = ("PROGRAMS", "WARPS", "REGISTERS", "BLOCK", "ELEMENTS", "LATENCY")  # of one_row
ROWS = ("PROGRAMS", "WARPS", "REGISTERS", "LOADS", "TALLEST", "FEWEST", "MOST")  # of few_rows
ATTENTION = ("PROGRAMS", "MOST_PROGRAMS", "WARPS", "REGISTERS", "ELEMENTS", "SEQUENCES")  # of one_token


class Way(NamedTuple):
    """How a model is made and run."""

    ratio: float | None = None  # None: dense
    products: Mapping[str, int] | None = None  # other constants of the kernel of fused layers; None: not fused
    rows: Mapping[str, int] = {}  # of the kernel for a few rows
    attention: Mapping[str, int] = {}  # of the kernel of their attention

    def __str__(self) -> str:
        if self.products is None:
            return "dense" if self.ratio is None else "low rank"
        told = ["fused"]
        for kernel, others in (("", self.products), ("rows ", self.rows), ("attention ", self.attention)):
            told += [f"{kernel}{name}={value}" for name, value in others.items()]
        return ", ".join(told)


def constants(names: Sequence[str]) -> Callable[[str], dict[str, int]]:
    """Return what reads constants from a text such as ``BLOCK=512,PROGRAMS=4``."""

    def read(text: str) -> dict[str, int]:
        try:
            found = {name: int(value) for name, value in (word.split("=") for word in text.split(","))}
        except ValueError:
            found = {}
        if not found or not set(found) <= set(names):
            raise argparse.ArgumentTypeError(
                f"must be like {names[0]}=4,{names[1]}=8, of {', '.join(names)}, got {text}"
            )
        return found

    return read


def build(
    name: str, ratio: float | None, device: torch.device, dtype: torch.dtype, *, fused: bool = False
) -> nn.Module:
    """Return a model with random weights; with a ``ratio``, its layers at low rank, lowered to plain ones or fused."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(MODELS[name]())
    model.eval().requires_grad_(False)
    if ratio is not None:
        model = fz.lower(fz.factorize(model, fz.LowRank(), ratio=ratio, init="default"))
        if fused:
            fuse_decoder(model)
    return model.to(dtype)


class Decoder:
    """Greedy decoding of a batch of sequences, one token a call, until the cache is full.

    ``options`` are those of torch's compiler; None compiles nothing.
    """

    def __init__(self, model: Any, batch: int, length: int, options: dict[str, bool] | None) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.cache = StaticCache(config=model.config, max_cache_len=length)  # it counts the tokens that it holds
        prompt = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device=self.device)
        with torch.no_grad():
            self.tokens = self._next(prompt)  # (batch, 1)
        self._call = self._next
        if options is not None:
            self._call = torch.compile(self._next, fullgraph=True, dynamic=False, options=options)
        self.step: Callable[[], object] = capture(self._step) if self.device.type == "cuda" else self._step

    @torch.no_grad()
    def _step(self) -> None:
        self.tokens.copy_(self._call(self.tokens))

    def _next(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)


def start(
    name: str, way: Way, batch: int, arguments: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Decoder]:
    """Return a model, and its decoder after the first step."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    options = dict.fromkeys(arguments.option, True) if arguments.compile else None
    model = build(name, way.ratio, device, dtype, fused=way.products is not None)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:  # constants are read when the graph is captured
        for module, others in ((one_row, way.products or {}), (few_rows, way.rows), (one_token, way.attention)):
            for constant, value in others.items():
                stack.enter_context(patch.object(module, constant, value))
        decoder = Decoder(model, batch, arguments.length, options)
        decoder.step()
    return model, decoder


@torch._dynamo.config.patch(recompile_limit=64)  # all models share one step function, and each compiles it again
def time_models(
    name: str, ways: Sequence[Way], batch: int, arguments: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each way, the dense one first: milliseconds a token, weights, peak memory."""
    cuda = device.type == "cuda"
    rows, decoders = [], []
    for way in ways:
        if cuda:
            gc.collect()
            torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated() if cuda else 0
        model, decoder = start(name, way, batch, arguments, device)
        decoders.append(decoder)
        rows.append(
            {
                "model": name,
                "batch": batch,
                "way": str(way),
                "ratio": way.ratio,
                "parameters": count_parameters(model),
                "bytes": sum(tensor.nbytes for tensor in model.parameters()),
                "peak_memory": torch.cuda.max_memory_allocated() - held if cuda else None,
                "options": arguments.option,
            }
        )
    steps = {place: decoder.step for place, decoder in enumerate(decoders)}
    times = median_milliseconds(steps, cuda, rounds=arguments.rounds, repeats=arguments.repeats)
    for place, row in enumerate(rows):
        row["milliseconds"] = times[place]
        row["over_dense"] = times[place] / times[0]
    return rows


def compile_in_parallel(words: Sequence[str], jobs: int) -> None:
    """Run the first step of every job in a process of its own, all at once, so that the compiler's cache has them."""
    command = [sys.executable, "-m", "benchmarks.decode", *words]
    processes = [subprocess.Popen([*command, "--only", str(job)]) for job in range(jobs)]
    for process in processes:
        process.wait()


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, time every model and write one JSON file, again after each."""
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="*", default=["llama-445m", "gpt2", "gpt2-large"], help=", ".join(MODELS))
    parser.add_argument("--ratio", type=float, action="append", help="share of the parameters; 0.5 unless given")
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 and 8 unless given")
    parser.add_argument("--length", type=int, default=512, help="tokens that the cache can hold")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--option", action="append", default=[], help="of torch's compiler, such as freezing")
    parser.add_argument("--fuse", action="store_true", help="low rank also by fz.integrations.fuse_decoder")
    for option, names in (("--kernel", PRODUCTS), ("--rows", ROWS), ("--attention", ATTENTION)):
        parser.add_argument(
            option,
            type=constants(names),
            action="append",
            default=[],
            help=f"with --fuse, also with other constants: {names[0]}=4,{names[1]}=8",
        )
    parser.add_argument("--parallel", action="store_true", help="first compile all at once, in a process each")
    parser.add_argument("--only", type=int, help="the first step of this one of all models, batches and ways; no times")
    words = sys.argv[1:] if words is None else words
    arguments = parser.parse_args(words)
    device = torch.device(arguments.device)
    needed = PROMPT + 5 + (arguments.rounds + 1) * arguments.repeats  # five to warm up
    if arguments.length < needed:
        raise SystemExit(f"--length {arguments.length} is less than the {needed} tokens of all rounds")
    if (arguments.kernel or arguments.rows or arguments.attention) and not arguments.fuse:
        raise SystemExit("--kernel, --rows and --attention are of fused layers: give --fuse too")
    ways = [Way()]
    for ratio in arguments.ratio or [0.5]:
        ways.append(Way(ratio))
        if arguments.fuse:
            ways += [Way(ratio, kernel) for kernel in [{}, *arguments.kernel]]
            ways += [Way(ratio, {}, rows=kernel) for kernel in arguments.rows]
            ways += [Way(ratio, {}, attention=kernel) for kernel in arguments.attention]
    models = [(name, batch) for name in arguments.models for batch in arguments.batch or [1, 8]]
    if arguments.only is not None:
        (name, batch), way = [(model, way) for model in models for way in ways][arguments.only]
        start(name, way, batch, arguments, device)
        return
    if arguments.parallel:
        compile_in_parallel(words, len(models) * len(ways))
    rows: list[dict[str, Any]] = []
    for name, batch in models:
        torch._dynamo.reset()
        rows += time_models(name, ways, batch, arguments, device)
        for row in rows[-len(ways) :]:
            print(row, flush=True)
        settings = {name: getattr(arguments, name) for name in ("length", "rounds", "repeats")}
        write(arguments.out, device, rows, **settings)


if __name__ == "__main__":
    main()
