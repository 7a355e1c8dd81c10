"""A recipe: everything that decides a training run, as data that is checked before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

if TYPE_CHECKING:
    from factorized.planning.scheme import Scheme

BUDGETS = ("ratio", "rank_scale", "rank", "energy", "macs")


class Section(BaseModel):
    """A table of a recipe: frozen, without fields nobody knows; ``true`` is no number, and a word is not one either."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Paper(Section):
    """The figure of the paper that a recipe aims at."""

    table: int | None = None
    figure: int | None = None
    accuracy: float | None = None  # test, percent
    deviation: float | None = None


class Model(Section):
    """Which network: a name of ``factorized.vision.models``, ``module:function`` or ``hf:FOLDER``."""

    name: str


class Data(Section):
    """Which images, and how they are varied."""

    name: str = "digits"
    crop_padding: int = Field(default=4, ge=0)
    flip: bool = True
    # "device" keeps the whole training set there as uint8; "loader" streams it, for what does not fit
    place: Literal["device", "loader"] = "device"
    workers: int = Field(default=0, ge=0)  # processes that read ahead for "loader"


class Factorize(Section):
    """How the weights become products; the fields of ``fz.plan`` and ``fz.factorize``."""

    scheme: Literal["none", "low_rank", "overcomplete", "tensor_train", "tucker"] = "none"
    kind: Literal["spatial", "channel"] = "spatial"  # of low_rank and overcomplete
    variant: Literal["full", "deep", "wide"] = "full"  # of overcomplete
    width: float = 3  # of overcomplete wide
    dims: list[int] | None = None  # of tensors: the dimensions that a weight is folded into; chosen unless given
    order: int | None = None  # of tensors: how many nearly equal dimensions, instead of dims
    separable: bool = False  # of tensors: a depthwise convolution, then the decomposed pointwise matrix
    core: Literal["whole", "train"] | None = None  # of tucker
    refinements: int = Field(default=0, ge=0)  # of tucker: rounds of HOOI after the HOSVD
    ratio: float | None = None
    rank_scale: float | None = None
    rank: int | None = None
    energy: float | None = None
    macs: float | None = None
    allocate: Literal["uniform", "spectrum"] = "uniform"
    include: list[str] | None = None
    exclude: list[str] = []
    keep_first_and_last: bool = True
    attention: bool | list[Literal["qk", "ov"]] = False  # of low_rank: shrink the heads too, or these forms of them
    init: Literal["spectral", "default", "kaiming", "normal"] | None = None
    execution: Literal["auto", "two_convs", "one_conv", "two_products"] = "auto"

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
        if self.scheme == "none" and (self.budget or self.init is not None):
            raise ValueError('a budget or an init needs a scheme: set factorize.scheme = "low_rank"')
        if self.scheme in ("low_rank", "tensor_train", "tucker") and not self.budget:
            raise ValueError(f"{self.scheme} needs a budget: one of {', '.join(BUDGETS)}")
        return self

    def build_scheme(self) -> Scheme | None:
        """Return the scheme these fields describe; None for a dense network."""
        # here, because they bring torch, which listing recipes does not need
        from factorized.planning.scheme import LowRank, Overcomplete
        from factorized.planning.tensor_scheme import TensorTrain, Tucker

        if self.scheme == "low_rank":
            return LowRank(self.kind)
        if self.scheme == "overcomplete":
            return Overcomplete(self.variant, self.width, self.kind)
        dims = None if self.dims is None else tuple(self.dims)
        if self.scheme == "tensor_train":
            return TensorTrain(dims, self.order, self.separable)
        if self.scheme == "tucker":
            return Tucker(dims, self.order, self.separable, self.core, self.refinements)
        return None


class Decay(Section):
    """What is decayed: every parameter alike, or the products as products."""

    kind: Literal["weight", "frobenius", "crs", "none", "normalized"] = "weight"
    strength: float = Field(default=1e-4, ge=0)
    # of parameters that belong to no product; the strength unless given, 0 for "none" and "normalized"
    rest: float | None = Field(default=None, ge=0)
    record_norms: bool = False  # write the products' norms at every step, for a "normalized" run to follow
    norms: str | None = None  # the folder of the run whose norms "normalized" follows; {seed} stands for the seed

    @property
    def of_the_rest(self) -> float:
        """The decay of parameters that belong to no product."""
        if self.rest is not None:
            return self.rest
        return 0.0 if self.kind in ("none", "normalized") else self.strength

    @model_validator(mode="after")
    def _rest_goes_with_products(self) -> Self:
        if self.rest is not None and self.kind in ("weight", "crs"):
            raise ValueError(f'rest sets a decay apart from that of the products, and kind = "{self.kind}" has one')
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


class Schedule(Section):
    """How long, and at what learning rate."""

    epochs: PositiveInt = 200
    milestones: list[PositiveFloat] = [0.5, 0.75]  # shares of the epochs, or epochs where at least 1
    factor: PositiveFloat = 0.1  # at every milestone
    warmup_epochs: int = Field(default=0, ge=0)
    warmup_factor: PositiveFloat = 0.1

    def learning_rate(self, base: float, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        if epoch < self.warmup_epochs:
            return base * self.warmup_factor
        # rounded: 0.55 of 100 epochs is 55.00000000000001
        passed = sum(epoch >= (m if m >= 1 else round(m * self.epochs, 6)) for m in self.milestones)
        return base * self.factor**passed


class Run(Section):
    """How it runs; batch and label_smoothing aside, none of it changes what is computed beyond rounding."""

    batch: PositiveInt = 128
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on CUDA
    compile: Literal["auto", "yes", "no"] = "auto"  # auto: on CUDA
    graph: Literal["auto", "no"] = "auto"  # auto: one CUDA graph per step where there is one process and a GPU
    evaluate_every: PositiveInt = 1
    checkpoint_every: PositiveInt = 1
    diagnose: bool = True


class Recipe(Section):
    """One training run."""

    name: str = "unnamed"  # also the folder of its runs
    title: str = ""
    paper: Paper | None = None
    model: Model
    data: Data = Data()
    factorize: Factorize = Factorize()
    decay: Decay = Decay()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    run: Run = Run()

    @field_validator("name")
    @classmethod
    def _stays_in_its_folder(cls, name: str) -> str:
        if not name.strip("/. ") or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"runs land in OUT/NAME: expected a name such as own/resnet8, got {name!r}")
        return name

    @model_validator(mode="after")
    def _decay_fits_the_scheme(self) -> Self:
        needs_products = self.decay.kind in ("frobenius", "crs", "normalized") or self.decay.record_norms
        if needs_products and self.factorize.scheme == "none":
            raise ValueError(
                f'decay.kind = "{self.decay.kind}" acts on products, and factorize.scheme = "none" makes none: set a '
                'scheme, or decay.kind = "weight"'
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain data, defaults included."""
        return self.model_dump(mode="json")
