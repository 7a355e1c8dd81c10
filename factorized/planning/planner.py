"""``fz.plan``: from a model and a budget to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypedDict

from torch import nn

from factorized._checks import check_whole, warn
from factorized.attention.register import find_attention
from factorized.formats.kernel import KernelShape
from factorized.formats.product import LowRank
from factorized.formats.scheme import Scheme
from factorized.nn.model import check_model, listed
from factorized.nn.running import ExampleInput, count_parameters
from factorized.planning.advice import Change, above_reach, out_of_reach, starved, trained_padding
from factorized.planning.assemble import assemble
from factorized.planning.budget import Of, read_budget
from factorized.planning.calibration import Calibrated
from factorized.planning.candidate import Candidate
from factorized.planning.parts import parts_of
from factorized.planning.pattern import Pattern
from factorized.planning.plan import Plan
from factorized.planning.projections import AttentionOption, read_option
from factorized.planning.ranks import Choices, lowest_cost
from factorized.planning.select import find_candidates
from factorized.planning.solve import Problem, pose, solve
from factorized.planning.spectrum import noise_spectrum, spectra_of

TINY = 50_000  # a layer with less than the model's parameters over this is not worth factorizing
Allocate = Literal["uniform", "spectrum"]


class PlanOptions(TypedDict, total=False):
    """The keyword arguments of ``fz.plan``, for functions that pass them on as ``**options: Unpack[PlanOptions]``.

    This keeps the list in one place, next to the signature that documents it, and type checkers see the names.
    """

    ratio: float | None
    rank_scale: float | None
    rank: int | None
    energy: float | None
    macs: float | None
    of: Of
    example_input: ExampleInput | None
    allocate: Allocate
    calibration: Calibrated | None
    multiple_of: int | None
    include: Sequence[Pattern] | None
    exclude: Sequence[Pattern]
    min_size: int | None
    keep_first_and_last: bool
    attention: AttentionOption | None


def plan(
    model: nn.Module,
    scheme: Scheme | None = None,
    *,
    ratio: float | None = None,
    rank_scale: float | None = None,
    rank: int | None = None,
    energy: float | None = None,
    macs: float | None = None,
    of: Of = "model",
    example_input: ExampleInput | None = None,
    allocate: Allocate = "uniform",
    calibration: Calibrated | None = None,
    multiple_of: int | None = None,
    include: Sequence[Pattern] | None = None,
    exclude: Sequence[Pattern] = (),
    min_size: int | None = None,
    keep_first_and_last: bool = True,
    attention: AttentionOption | None = None,
) -> Plan:
    """Choose which layers of ``model`` to factorize, and their ranks; the model is not changed.

    Give exactly one of ``ratio``, ``rank_scale``, ``rank``, ``energy`` and ``macs``; ``Overcomplete`` needs none.

    Args:
        model: any ``nn.Module``, also one on the meta device.
        scheme: ``LowRank()`` unless given.
        ratio: parameters of the whole model after, relative to before; never exceeded, and met to one rank step.
        rank_scale: the paper's rule: ``round(scale · out·kh)`` for convolutions, ``round(scale · min(m, n))``
            otherwise; for tensors see ``TensorTrain`` and ``Tucker``.
        rank: the same rank everywhere; layers that it would not make smaller, or whose full rank is lower, stay dense.
        energy: share of each layer's squared singular values to keep; with ``calibration``, of its outputs.
        macs: multiply-accumulates of the whole model after, relative to before, on ``example_input``; of schemes that
            compress.
        of: what ``ratio`` and ``macs`` are a share of: the whole ``"model"``, or only the ``"selected"`` layers.
        example_input: what the model's forward takes (a tensor, a tuple, a dict); fills the plan's MACs.
        allocate: ``"uniform"`` spends a budget at one rank scale (the paper), ``"spectrum"`` where the singular values
            of the given weights gain most; with ``calibration``, where the outputs of layers gain most.
        calibration: ``fz.Calibrated(batches)``: data to choose ranks by, for ``allocate="spectrum"`` and ``energy``.
            ``fz.factorize`` takes it as ``init=``.
        multiple_of: round ranks to multiples of this number, within the budget (``energy`` rounds up). By default,
            a ``ratio`` or ``macs`` rounds the ranks of matrices with a side of 512 or more to multiples of 8 to 64, as
            far as that leaves less than 1 % of the budget unspent: GPUs multiply those faster. 1 rounds nothing.
        include: only these layers: names, globs or types, of the layers or of containers around them.
        exclude: not these.
        min_size: leave layers with fewer parameters dense; by default those with less than 1/50,000 of the model's.
        keep_first_and_last: leave the first and last layer dense, as the paper does, unless ``include`` names them.
        attention: ``"layers"``, the default, treats every projection as a layer like any other; ``"heads"`` gives the
            heads of every attention module fewer dimensions (the paper), in both forms (only OV under rotary
            embeddings) or in those given, ``("qk", "ov")`` or one of them; ``False`` leaves attention as it is, except
            for projections that ``include`` names.

    Raises:
        ValueError: not exactly one budget is given, a budget is out of reach (the message names the arguments that
            would reach it), a pattern matches no layer, or an argument has a wrong value.

    Examples:
        >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        >>> plan = fz.plan(model, fz.LowRank(), ratio=0.8)
        >>> [(entry.name, entry.rank, entry.reason) for entry in plan.entries][:2]
        [('0', None, 'first layer (keep_first_and_last=True)'), ('1', 12, None)]
        >>> fz.plan(model, energy=0.5, include=["1", "2"]).params_after < plan.params
        True
    """
    check_model(model)
    scheme = LowRank() if scheme is None else scheme
    given = {"ratio": ratio, "rank_scale": rank_scale, "rank": rank, "energy": energy, "macs": macs}
    budget = read_budget(scheme, allocate, example_input is not None, given, of, multiple_of)
    by_spectrum = allocate == "spectrum" or budget.name == "energy"
    _check_calibration(calibration, by_spectrum)
    if min_size is not None:
        check_whole("min_size", min_size, least=0)
    options = PlanOptions(
        include=include,
        exclude=exclude,
        min_size=min_size,
        keep_first_and_last=keep_first_and_last,
        attention=attention,
        multiple_of=multiple_of,
    )

    def posed(change: Change) -> Problem:
        changed: PlanOptions = {**options, **change}  # type: ignore[typeddict-item]  # its keys are options
        own = replace(budget, multiple_of=changed["multiple_of"])
        return pose(model, scheme, own, _candidates(model, scheme, changed, example_input), example_input)

    problem = posed({})
    if not problem.weights:
        raise ValueError(_nothing_selected(model, problem.candidates))
    changes = _changes(scheme, options)
    if budget.is_share and problem.target < lowest_cost(problem.items):
        raise out_of_reach(model, problem, changes, posed)
    precise = budget.name == "energy"  # other spectra are compared with one another: five digits are enough
    spectra = spectra_of(model, problem.weights, calibration, precise=precise) if by_spectrum else None
    if spectra is not None and allocate == "spectrum" and calibration is not None and calibration.loss is not None:
        spectra = [noise_spectrum(spectrum) for spectrum in spectra]
    choices = solve(problem, spectra)
    if budget.is_share and (message := above_reach(model, problem, choices)) is not None:
        raise ValueError(message)
    if all(choice is None for choice in choices):
        raise ValueError(
            f"{budget} leaves every layer of {type(model).__name__} dense: factorizing at that rank would make them "
            "larger. Ask for less"
        )
    made = _made(model, problem, choices)
    if (message := starved(model, problem, choices, made, changes, posed)) is not None:
        warn(message)
    if (message := trained_padding(model, made)) is not None:
        warn(message)
    return made


def _check_calibration(calibration: object, by_spectrum: bool) -> None:
    if calibration is None:
        return
    if not isinstance(calibration, Calibrated):
        raise ValueError(f"calibration must be fz.Calibrated(batches), got {type(calibration).__name__}")
    if not by_spectrum:
        raise ValueError('calibration= chooses ranks for allocate="spectrum" or energy=; give one of them')


def _candidates(
    model: nn.Module, scheme: Scheme, options: PlanOptions, example_input: ExampleInput | None
) -> list[Candidate]:
    given = options["min_size"]
    least = count_parameters(model) // TINY if given is None else given

    def refuse(module: nn.Module, shape: KernelShape) -> str | None:
        small = f"has {shape.numel:,} parameters, fewer than min_size={least:,}" if shape.numel < least else None
        return scheme.refuse(module, shape) or small

    return find_candidates(
        model,
        scheme.kernel,
        options["include"],
        options["exclude"],
        options["keep_first_and_last"],
        refuse,
        read_option(options["attention"], scheme),
        example_input,
    )


def _made(model: nn.Module, problem: Problem, choices: Choices) -> Plan:
    """Return the plan, with the model's parts."""
    zipped = zip(problem.weights, problem.costs, choices, strict=True)
    solved = {tied[0].name: (cost, choice) for tied, cost, choice in zipped}
    made = assemble(model, problem.scheme, problem.budget, problem.candidates, solved, problem.measured)
    return replace(made, parts=parts_of(made, [found.name for found in find_attention(model)]))


def _changes(scheme: Scheme, options: PlanOptions) -> list[Change]:
    """Return the argument changes that may bring a lower budget within reach, one at a time."""
    changes: list[Change] = []
    if options["attention"] not in (None, "layers"):
        changes.append({"attention": "layers"})
    elif scheme.by_spectrum:
        changes.append({"attention": "heads"})
    if options["keep_first_and_last"]:
        changes.append({"keep_first_and_last": False})
    if options["min_size"]:
        changes.append({"min_size": 0})
    if options["multiple_of"] not in (None, 1):
        changes.append({"multiple_of": 1})
    if options["include"] is not None:
        changes.append({"include": None})
    if options["exclude"]:
        changes.append({"exclude": ()})
    return changes


def _nothing_selected(model: nn.Module, candidates: list[Candidate]) -> str:
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        names.setdefault(str(candidate.reason), []).append(candidate.name or "the model itself")
    reasons = listed([f"{listed(left_out, 2)}: {reason}" for reason, left_out in names.items()], 4, "; ")
    found = f"all of its layers are left out ({reasons})" if candidates else "it has no layer with a weight matrix"
    return f"nothing to factorize in {type(model).__name__}: {found}. See include=, exclude=, keep_first_and_last="
