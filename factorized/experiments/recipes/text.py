"""A recipe of text: everything that decides the training of a translator or a language model, as checked data."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, field_validator, model_validator

from factorized.experiments.recipes.recipe import (
    Factorize,
    Line,
    Named,
    Recipe,
    Section,
    Share,
    Strength,
    Word,
    portable,
)

Task = Literal["language", "masked", "translation", "questions"]
Updates = Annotated[int, Field(gt=0, le=100_000_000)]
Size = Annotated[int, Field(gt=0, le=1_000_000)]
# which tasks use a field that others do not
USED_BY: dict[str, dict[str, tuple[Task, ...]]] = {
    "data": {"mask": ("masked",), "stride": ("questions",), "lower": ("masked", "translation", "questions")},
    "run": {
        "tokens": ("translation",),
        "beam": ("translation",),
        "longest": ("translation",),
        "label_smoothing": ("language", "masked", "translation"),
    },
    "model": {"kv_heads": ("language",), "from_run": ("masked", "questions"), "positions": ("masked", "questions")},
}


class TextModel(Section):
    """A transformer by its sizes, or a folder of a Hugging Face model."""

    name: Line = ""  # "hf:FOLDER"; empty: the task's own architecture, of these sizes
    hidden: Size = 128
    layers: Size = 2  # of a translator: in the encoder, and as many in the decoder
    heads: Size = 4
    kv_heads: Size | None = None  # of a language model: keys and values shared by several heads
    feed_forward: Size = 512
    dropout: float = Field(default=0.0, ge=0, lt=1)
    positions: Size | None = None  # of BERT: the longest sequence it can ever read; data.length unless given
    tied: bool = True  # one matrix for embeddings and output
    # spectral: balance the two factors of every head's OV form, which leaves the function as it is
    attention_init: Literal["default", "spectral"] = "default"
    # of masked and questions: the folder of the run whose model is trained further; {seed} stands for the seed
    from_run: Annotated[Word, AfterValidator(portable)] | None = None

    @field_validator("name")
    @classmethod
    def _portable_folder(cls, name: str) -> str:
        if name and not name.startswith("hf:"):
            raise ValueError(f"expected hf:FOLDER, or nothing for the task's own architecture, got {name!r}")
        return f"hf:{portable(name.removeprefix('hf:'))}" if name else name

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.name and self.from_run is not None:
            raise ValueError(f"give name = {self.name!r} or from_run = {self.from_run!r}, not both")
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"heads = {self.heads} must divide hidden = {self.hidden}")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}")
        return self


class TextData(Section):
    """Which text, and how it becomes tokens. Files are looked for in the folder of ``--data``."""

    name: Word = "pydoc"  # "pydoc" and "numbers" are embedded; any other name is for the results alone
    # files, folders of them, two files as "train.{de,en}", Hugging Face data sets as "hf:NAME?config=CONFIG"
    train: list[Word] = Field(default=[])
    validation: list[Word] = Field(default=[])  # nothing: a twentieth of the training text
    test: list[Word] = Field(default=[])
    vocabulary: Size | Word = 4000  # tokens to learn from the training text, or a file with one word piece a line
    lower: bool = False
    length: Annotated[int, Field(ge=8, le=1_000_000)] = 128  # tokens of a sequence
    mask: Share = 0.15  # of masked language models: the share of tokens to predict
    # of questions: tokens of a paragraph that one window shares with the next
    stride: Annotated[int, Field(ge=0, le=1_000_000)] = 128


class TextFactorize(Factorize):
    """Which layers become products, as for images."""

    # network: each factor with the deviation of the network's own matrices, as the paper's translators were drawn
    init: Literal["spectral", "default", "kaiming", "normal", "network"] | None = None  # type: ignore[assignment]


class TextDecay(Section):
    """What is decayed: every matrix alike, or products as products."""

    kind: Literal["none", "weight", "frobenius"] = "weight"
    strength: Strength = 0.01
    rest: Strength | None = None  # of frobenius: for parameters in no product; the strength unless given
    # which products Frobenius decay acts on; factorized layers and the OV forms of attention unless given
    forms: Annotated[list[Literal["layers", "ov", "qk"]], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _rest_and_forms_go_with_frobenius(self) -> Self:
        for name, value in (("rest", self.rest), ("forms", self.forms)):
            if self.kind != "frobenius" and value is not None:
                raise ValueError(f'{name} = {value} is for kind = "frobenius", got kind = "{self.kind}"')
        return self

    @property
    def of_the_rest(self) -> float:
        """The decay of parameters that belong to no product."""
        return self.strength if self.rest is None else self.rest


class TextOptimizer(Section):
    """The optimizer; ``flambe`` is LAMB with decoupled Frobenius decay, and takes the decay's strength itself."""

    name: Literal["adamw", "sgd", "lamb", "flambe"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = Field(default=0.9, ge=0, lt=1)  # of sgd
    nesterov: bool = False  # of sgd
    clip: PositiveFloat | None = 1.0  # of the gradient's norm, before any Frobenius decay

    @field_validator("betas", mode="before")
    @classmethod
    def _from_toml(cls, betas: object) -> object:
        return tuple(betas) if isinstance(betas, list) else betas


class TextSchedule(Section):
    """How long, and at what learning rate."""

    updates: Updates = 1000
    warmup: Annotated[float, Field(ge=0)] = 0.1  # updates, or their share where below 1
    shape: Literal["cosine", "linear", "inverse_sqrt", "constant"] = "cosine"  # after the warm-up
    floor: float = Field(default=0.0, ge=0, le=1)  # of cosine and linear: the share of the learning rate at the end

    @property
    def warmup_updates(self) -> int:
        """Updates of linear warm-up."""
        return round(self.warmup * self.updates) if self.warmup < 1 else round(self.warmup)

    def factor(self, update: int) -> float:
        """Return the share of the learning rate at an update, counted from 0."""
        first = self.warmup_updates
        if update < first:
            return (update + 1) / first
        if self.shape == "constant":
            return 1.0
        if self.shape == "inverse_sqrt":
            return float((max(first, 1) / (update + 1)) ** 0.5)
        done = (update - first) / max(1, self.updates - first)
        left = (1 + math.cos(math.pi * min(done, 1.0))) / 2 if self.shape == "cosine" else max(0.0, 1 - done)
        return self.floor + (1 - self.floor) * left


class TextRun(Section):
    """How it runs."""

    batch: Annotated[int, Field(gt=0, le=10_000_000)] = 32  # sequences of an update, on all devices together
    tokens: Updates = 4000  # of translation, in place of batch: target tokens of an update
    accumulate: Annotated[int, Field(gt=0, le=100_000)] = 1  # parts of a batch that are computed one after the other
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA
    compile: bool = False
    graph: Literal["auto", "no"] = "auto"  # auto: on one GPU, a pass is one CUDA graph where shapes allow it
    shard: bool = False  # split parameters and the optimizer's state over the processes that torchrun started (FSDP2)
    evaluate_every: Updates = 500
    checkpoint_every: Updates = 1000
    beam: Annotated[int, Field(gt=0, le=1000)] = 5  # of translation: hypotheses kept while decoding
    longest: Annotated[int, Field(gt=0, le=100_000)] = 200  # of translation: tokens of a translation


class TextRecipe(Named):
    """One training run on text."""

    task: Task
    model: TextModel = TextModel()
    data: TextData = TextData()
    factorize: TextFactorize = TextFactorize()
    decay: TextDecay = TextDecay()
    optimizer: TextOptimizer = TextOptimizer()
    schedule: TextSchedule = TextSchedule()
    run: TextRun = TextRun()

    def of_seed(self, seed: int) -> Self:
        """Return the recipe with the run it continues from named for one seed."""
        if self.model.from_run is None:
            return self
        run = self.model.from_run.replace("{seed}", str(seed))
        return self.model_copy(update={"model": self.model.model_copy(update={"from_run": run})})

    @model_validator(mode="after")
    def _only_fields_of_the_task(self) -> Self:
        for section, fields in USED_BY.items():
            changed = getattr(self, section).changed
            for name, tasks in fields.items():
                if self.task not in tasks and name in changed:
                    raise ValueError(
                        f"{section}.{name} = {changed[name][0]!r} is for {' and '.join(tasks)}, and task is "
                        f"{self.task}: remove it"
                    )
        return self

    @model_validator(mode="after")
    def _windows_go_forward(self) -> Self:
        if self.task == "questions" and self.data.stride >= self.data.length:
            raise ValueError(
                f"data.stride = {self.data.stride} must be less than data.length = {self.data.length}: windows of a "
                "paragraph share so many tokens"
            )
        return self

    @model_validator(mode="after")
    def _flambe_decays_products(self) -> Self:
        if self.optimizer.name == "flambe" and self.decay.kind != "frobenius":
            raise ValueError(
                f'optimizer.name = "flambe" decays products: set decay.kind = "frobenius", got "{self.decay.kind}"'
            )
        return self

    @model_validator(mode="after")
    def _batch_can_be_shared(self) -> Self:
        if self.task != "translation" and self.run.batch % self.run.accumulate:
            raise ValueError(
                f"run.batch = {self.run.batch} must be a multiple of run.accumulate = {self.run.accumulate}"
            )
        return self


AnyRecipe = Recipe | TextRecipe
