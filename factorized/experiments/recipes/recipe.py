"""A recipe: everything that decides a training run, as data that is checked before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, field_validator, model_validator

BUDGETS = ("ratio", "rank_scale", "rank", "energy", "macs")
TENSORS = ("tensor_train", "tucker")
COMPRESSING = ("low_rank", *TENSORS, "monarch", "kronecker")  # they need a budget
# which schemes use a field of [factorize]; fields that are not here are used by all of them
USED_BY = {
    "kind": ("low_rank", "overcomplete"),
    "execution": ("low_rank", "overcomplete"),
    "variant": ("overcomplete",),
    "width": ("overcomplete",),
    "dims": TENSORS,
    "order": TENSORS,
    "separable": TENSORS,
    "core": ("tucker",),
    "refinements": ("tucker",),
    "blocks": ("monarch",),
    "outer": ("kronecker",),
    "energy": ("low_rank",),
    "macs": COMPRESSING,
    "allocate": ("low_rank",),
    "multiple_of": ("low_rank", "overcomplete"),
}
MOST_EPOCHS = 100_000
LINEAR_WARMUP = 0.1  # of the training
MOST_RANK = 1_000_000


def is_used_by(scheme: object, field: str) -> bool:
    """Return whether a scheme uses a field of [factorize]; a dense network uses none."""
    return scheme != "none" and (field not in USED_BY or scheme in USED_BY[field])


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"expected text without line breaks and control characters, got {text[:40]!r}")
    return text


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError(f"expected a word, got {text!r}")
    return _one_line(text)


def portable(path: str) -> str:
    """Return an absolute path relative to the working folder or home, so that results do not show a user's folders."""
    if not Path(path).is_absolute():
        return path
    starts = (("", Path.cwd()), ("~/", Path("~").expanduser()))
    inside = (f"{start}{Path(path).relative_to(top)}" for start, top in starts if Path(path).is_relative_to(top))
    return next(inside, path)


Line = Annotated[str, Field(max_length=1000), AfterValidator(_one_line)]
Word = Annotated[str, Field(max_length=1000), AfterValidator(_word)]
Epochs = Annotated[int, Field(gt=0, le=MOST_EPOCHS)]
Share = Annotated[float, Field(gt=0, le=1)]
Strength = Annotated[float, Field(ge=0, le=100)]  # at λ = 100, a learning rate of 0.01 already erases a weight


class Section(BaseModel):
    """A table of a recipe: frozen, strictly typed, without unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """The value and the default of every field that is not at its default."""
        both = {name: (getattr(self, name), field.get_default()) for name, field in type(self).model_fields.items()}
        return {name: (value, default) for name, (value, default) in both.items() if value != default}


class Paper(Section):
    """The figure of the paper that a recipe aims at."""

    table: int | None = Field(default=None, ge=1, le=100)
    figure: int | None = Field(default=None, ge=1, le=100)
    accuracy: float | None = Field(default=None, ge=0, le=100)  # test, percent
    f1: float | None = Field(default=None, ge=0, le=100)  # of questions
    deviation: float | None = Field(default=None, ge=0, le=100)


class Model(Section):
    """Which network: a name of ``factorized.experiments.models``, ``module:function`` or ``hf:FOLDER``."""

    name: Word

    @field_validator("name")
    @classmethod
    def _portable_folder(cls, name: str) -> str:
        return f"hf:{portable(name.removeprefix('hf:'))}" if name.startswith("hf:") else name


class Data(Section):
    """Which images, and how they are varied."""

    name: Word = "digits"
    crop_padding: int = Field(default=4, ge=0, le=1000)  # below the images' side, checked where they are known
    flip: bool = True
    cutout: int = Field(default=0, ge=0, le=1000)  # side of the square that is cut out of an image, checked likewise
    # "device" keeps the whole training set there as uint8; "loader" streams it, for what does not fit
    place: Literal["device", "loader"] = "device"
    workers: int = Field(default=0, ge=0)  # processes that read ahead for "loader"; checked against the machine's cores

    @model_validator(mode="after")
    def _workers_go_with_the_loader(self) -> Self:
        if self.workers and self.place != "loader":
            raise ValueError(
                f'workers = {self.workers} read ahead for place = "loader", and place is "{self.place}": set place = '
                '"loader", or workers = 0'
            )
        return self


class Factorize(Section):
    """How the weights become products; the fields of ``fz.plan`` and ``fz.factorize``."""

    scheme: Literal["none", "low_rank", "overcomplete", "tensor_train", "tucker", "monarch", "kronecker"] = "none"
    kind: Literal["spatial", "channel"] = "spatial"  # of low_rank and overcomplete
    variant: Literal["full", "deep", "wide"] = "full"  # of overcomplete
    width: float = Field(default=3, ge=1, le=1000)  # of overcomplete wide
    # of tensors: the dimensions that a weight is folded into, or how many nearly equal ones; chosen unless given
    dims: list[Annotated[int, Field(gt=0)]] | None = None
    order: int | None = Field(default=None, ge=2, le=64)
    separable: bool = False  # of tensors: a depthwise convolution, then the decomposed pointwise matrix
    core: Literal["whole", "train"] | None = None  # of tucker
    refinements: int = Field(default=0, ge=0, le=1000)  # of tucker: rounds of HOOI after the HOSVD
    blocks: int | None = Field(default=None, gt=0, le=MOST_RANK)  # of monarch: a weight is cut into blocks × blocks
    # of kronecker: rows and columns of the small matrices, which divide outputs and inputs
    outer: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=2, max_length=2)] | None = None
    ratio: float | None = Field(default=None, gt=0, le=1000)
    rank_scale: float | None = Field(default=None, gt=0, le=1000)
    rank: int | None = Field(default=None, gt=0, le=MOST_RANK)
    energy: Share | None = None
    macs: Share | None = None
    of: Literal["model", "selected"] = "model"  # what ratio and macs are a share of
    allocate: Literal["uniform", "spectrum"] = "uniform"
    multiple_of: int | None = Field(default=None, gt=0, le=MOST_RANK)  # of which ranks are multiples
    include: list[Word] | None = None
    exclude: list[Word] = []
    min_size: int | None = Field(default=None, ge=0)  # layers with fewer parameters stay dense
    keep_first_and_last: bool = True
    # projections as layers, heads cut (of low_rank), all forms of them or these, or neither
    attention: Literal["layers", "heads", False] | Annotated[list[Literal["qk", "ov"]], Field(min_length=1)] = "layers"
    init: Literal["spectral", "default", "kaiming", "normal"] | None = None
    execution: Literal["auto", "composed", "chain", "products"] = "auto"

    @property
    def budget(self) -> dict[str, float]:
        """The budget as ``fz.plan`` takes it, by name."""
        given = {name: getattr(self, name) for name in BUDGETS}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def depends_on_weights(self) -> bool:
        """Whether the ranks come from the weights, and may differ from seed to seed."""
        return self.scheme != "none" and (self.energy is not None or self.allocate == "spectrum")

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        if len(self.budget) > 1:
            raise ValueError(f"give one of {', '.join(BUDGETS)}, got {', '.join(self.budget)}")
        if self.scheme in COMPRESSING and not self.budget:
            raise ValueError(f"{self.scheme} needs a budget, such as ratio = 0.1: one of {', '.join(BUDGETS)}")
        return self

    @model_validator(mode="after")
    def _only_fields_of_the_scheme(self) -> Self:
        for name, (value, default) in self.changed.items():
            if name == "scheme":
                continue
            if self.scheme == "none":
                raise ValueError(f'{name} = {value!r} needs a scheme: set factorize.scheme = "low_rank", or remove it')
            if not is_used_by(self.scheme, name):
                raise ValueError(
                    f"{name} = {value!r} is for {' and '.join(USED_BY[name])}, and scheme is {self.scheme}: "
                    + (f"set {name} back to {default!r}" if default is not None else "remove it")
                )
            if name == "width" and (self.variant != "wide" or self.budget):
                raise ValueError(
                    f"width = {value:g} is the rank scale of variant wide without a budget, got variant "
                    f"{self.variant} {self.budget or ''}: set width back to {default:g}"
                )
        return self


class Decay(Section):
    """What is decayed: every parameter alike, or the products as products."""

    kind: Literal["weight", "frobenius", "crs", "none", "normalized"] = "weight"
    strength: Strength = 1e-4
    # of parameters that belong to no product; the strength unless given, 0 for "none" and "normalized"
    rest: Strength | None = None
    record_norms: bool = False  # write the products' norms at every step, for a "normalized" run to follow
    # the folder of the run whose norms "normalized" follows; {seed} stands for the seed
    norms: Annotated[Word, AfterValidator(portable)] | None = None

    @property
    def of_the_rest(self) -> float:
        """The decay of parameters that belong to no product."""
        if self.rest is not None:
            return self.rest
        return 0.0 if self.kind in ("none", "normalized") else self.strength

    @model_validator(mode="after")
    def _rest_goes_with_products(self) -> Self:
        if self.rest is not None and self.kind in ("weight", "crs"):
            raise ValueError(
                f'rest is the decay of everything but the products, and kind = "{self.kind}" has one decay: remove it'
            )
        return self

    @model_validator(mode="after")
    def _norms_go_with_normalized(self) -> Self:
        if (self.kind == "normalized") != (self.norms is not None):
            raise ValueError(
                'kind = "normalized" follows the norms of another run: name its folder in norms, and only there. That '
                "run needs record_norms = true"
            )
        return self


class Optimizer(Section):
    """Stochastic gradient descent with momentum."""

    lr: PositiveFloat = 0.1
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    clip: PositiveFloat | None = None  # of the gradient's norm, before any Frobenius decay

    @model_validator(mode="after")
    def _nesterov_goes_with_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true needs a momentum above 0, such as momentum = 0.9")
        return self


class Schedule(Section):
    """How long, and at what learning rate."""

    epochs: Epochs = 200
    # linear: rises for a tenth of the training, then falls to zero, step by step: for weights that are trained already
    shape: Literal["milestones", "linear"] = "milestones"
    milestones: list[PositiveFloat] = [0.5, 0.75]  # shares of the epochs, or epochs where at least 1
    factor: Share = 0.1  # at every milestone
    warmup_epochs: int = Field(default=0, ge=0, le=MOST_EPOCHS)
    warmup_factor: Share = 0.1

    @model_validator(mode="after")
    def _milestones_go_with_their_shape(self) -> Self:
        for name, (value, default) in self.changed.items():
            if self.shape == "linear" and name not in ("shape", "epochs"):
                raise ValueError(
                    f'{name} = {value!r} is for shape = "milestones", and shape is "linear": set {name} back to '
                    f"{default!r}"
                )
        return self

    def learning_rate(self, base: float, epoch: float) -> float:
        """Return the learning rate of an epoch, counted from 0; at a point within it where the shape is linear."""
        if self.shape == "linear":
            done = epoch / self.epochs
            return base * min(done / LINEAR_WARMUP, (1 - done) / (1 - LINEAR_WARMUP))
        if epoch < self.warmup_epochs:
            return base * self.warmup_factor
        # rounded: 0.55 of 100 epochs is 55.00000000000001
        passed = sum(epoch >= (m if m >= 1 else round(m * self.epochs, 6)) for m in self.milestones)
        return base * self.factor**passed


class Run(Section):
    """How it runs; only ``batch`` and ``label_smoothing`` change what is computed by more than rounding."""

    batch: int = Field(default=128, gt=0, le=10_000_000)  # at most the training images, checked where they are known
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA
    compile: Literal["auto", "yes", "no"] = "auto"  # auto: on CUDA
    graph: Literal["auto", "no"] = "auto"  # auto: one CUDA graph per step where there is one process and a GPU
    evaluate_every: Epochs = 1
    checkpoint_every: Epochs = 1
    diagnose: bool = True


class Named(Section):
    """What every recipe has, of images or of text: a name, and the figure it aims at."""

    name: Line = "unnamed"  # also the folder of its runs
    title: Line = ""
    paper: Paper | None = None
    shortened_from: int | None = Field(default=None, gt=0)  # the epochs or updates of the recipe that this one shortens

    @field_validator("name")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        if not name.strip("/. ") or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"runs are written to OUT/NAME: expected a name such as own/resnet8, got {name!r}")
        if max(len(part.encode()) for part in name.split("/")) > 200:
            raise ValueError(f"runs are written to OUT/NAME: expected at most 200 bytes a folder, got {name[:40]!r}…")
        return name

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, defaults included."""
        return self.model_dump(mode="json")


class Recipe(Named):
    """One training run on images."""

    model: Model
    data: Data = Data()
    factorize: Factorize = Factorize()
    decay: Decay = Decay()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    run: Run = Run()

    @model_validator(mode="after")
    def _decay_fits_the_scheme(self) -> Self:
        needs_products = self.decay.kind in ("frobenius", "crs", "normalized") or self.decay.record_norms
        if needs_products and self.factorize.scheme == "none":
            raise ValueError(
                f'decay.kind = "{self.decay.kind}" acts on products, and factorize.scheme = "none" makes none: set a '
                'scheme, or decay.kind = "weight"'
            )
        return self
