"""The budget of a plan: exactly one of five arguments, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from factorized._checks import check_choice, check_whole, is_number, plain_number
from factorized.formats.scheme import LARGEST_SCALE, Scheme
from factorized.planning.calibration import Calibrated
from factorized.planning.schemes import SCHEMES

BUDGETS = ("ratio", "rank_scale", "rank", "energy", "macs")
LARGEST = 10**18  # of any budget
Of = Literal["model", "selected"]


@dataclass(frozen=True)
class Budget:
    """One budget as the user wrote it."""

    name: str
    value: float
    of: Of = "model"  # what a ratio or macs is a share of
    multiple_of: int | None = None  # ranks are multiples of it; None: chosen where a budget leaves room

    @property
    def is_share(self) -> bool:
        """Whether the budget is a share of what the model costs, to be spent on ranks."""
        return self.name in ("ratio", "macs")

    @property
    def counted(self) -> str:
        """What the budget counts."""
        return "multiply-accumulates" if self.name == "macs" else "parameters"

    def __str__(self) -> str:
        of = f', of="{self.of}"' if self.of != "model" else ""
        multiple = f", multiple_of={self.multiple_of}" if self.multiple_of is not None else ""
        return f"{self.name}={self.value:g}{of}{multiple}"


def _meant(scheme: object) -> str:
    """Return what was probably meant by this value for a scheme, or nothing."""
    for known in SCHEMES:
        if scheme in (known, known.name):
            return f"; make one: {known.__name__}()"
    if isinstance(scheme, Calibrated):
        return "; data are given as init= of fz.factorize, or calibration= of fz.plan"
    return f"; a budget has a name: ratio={scheme}" if isinstance(scheme, (int, float)) else ""


def read_budget(
    scheme: Scheme, allocate: str, has_example: bool, given: dict[str, float | None], of: Of, multiple_of: int | None
) -> Budget:
    """Return the one budget that was given, or the scheme's default; raise if it is invalid."""
    if not isinstance(scheme, Scheme):
        known = ", ".join(f"{known.__name__}()" for known in SCHEMES)
        raise ValueError(f"scheme must be one of {known}, got {scheme!r}{_meant(scheme)}")
    check_choice("allocate", allocate, ("uniform", "spectrum"))
    check_choice("of", of, ("model", "selected"))
    if multiple_of is not None:
        check_whole("multiple_of", multiple_of)
        if not all(format.is_product for format in scheme.formats):
            raise ValueError(f"multiple_of= rounds the ranks of LowRank and Overcomplete, got {scheme}; leave it out")
    budgets = [Budget(name, plain_number(value)) for name, value in given.items() if value is not None]
    if not budgets and scheme.rank_scale is not None:
        budgets = [Budget("rank_scale", scheme.rank_scale)]
    if len(budgets) != 1:
        got = ", ".join(map(str, budgets)) or "none; ratio=0.5 keeps half of the parameters"
        raise ValueError(f"give exactly one of {', '.join(f'{name}=' for name in given)}, got {got}")
    budget = replace(budgets[0], of=of, multiple_of=multiple_of)
    _check_value(scheme, budgets[0])
    if of == "selected" and not budget.is_share:
        raise ValueError(f'of="selected" says what ratio= or macs= is a share of, got {budgets[0]}; leave it out')
    if allocate == "spectrum" and (budget.name not in ("ratio", "macs") or not scheme.by_spectrum):
        raise ValueError(f'allocate="spectrum" spends ratio= or macs= on LowRank layers, got {budget} and {scheme}')
    if budget.name == "macs" and not has_example:
        raise ValueError("macs= counts multiply-accumulates on an input: pass example_input= as well")
    return budget


def _check_value(scheme: Scheme, budget: Budget) -> None:
    value = budget.value
    if isinstance(value, (tuple, list)):
        raise ValueError(
            f"{budget.name} must be one number for all layers, got {value!r}; the ranks of one tensor are for "
            "from_dense of a layer, with scheme.at_rank(shape, ranks)"
        )
    if isinstance(value, int) and abs(value) > LARGEST:  # too long to show
        raise ValueError(f"{budget.name} must be below {LARGEST:.0e}, got a number of more than 18 digits")
    if not is_number(value):
        raise ValueError(f"{budget.name} must be a number, got {value!r}")
    if budget.name == "rank":
        if value != int(value) or value < 1:
            raise ValueError(f"rank must be a whole number of at least 1, got {value!r}")
        return
    if value <= 0:
        raise ValueError(f"{budget} is not positive; {_allowed(scheme, budget)}")
    if budget.name == "rank_scale" and value > LARGEST_SCALE:
        raise ValueError(f"{budget} is above {LARGEST_SCALE}, the largest multiple of full rank; ask for less")
    if (budget.name == "energy" and not scheme.by_spectrum) or (budget.name == "macs" and not scheme.compresses):
        fit = "LowRank" if budget.name == "energy" else "schemes that compress"
        shares = "ratio=, macs=" if scheme.compresses else "ratio="
        none = ", or none" if scheme.rank_scale is not None else ""
        raise ValueError(f"{budget} is for {fit}; {type(scheme).__name__} takes {shares}, rank_scale= or rank={none}")
    if budget.name == "rank_scale" and value < scheme.least_scale:
        raise ValueError(f"{budget} is below full rank; rank_scale must be at least 1 for {scheme}, or use LowRank()")
    if budget.name in ("ratio", "energy", "macs") and value > 1 and scheme.compresses:
        percent = f"; for {value:g} %, {budget.name}={value / 100:g}" if 2 <= value <= 100 else ""
        raise ValueError(f"{budget} is above 1{percent}; {_allowed(scheme, budget)}")


def _allowed(scheme: Scheme, budget: Budget) -> str:
    if budget.name == "rank_scale" or not scheme.compresses:
        return f"{budget.name} must be above 0"
    hint = "; use Overcomplete(...) to train more parameters than the dense model has" if budget.name == "ratio" else ""
    return f"{budget.name} must be in (0, 1]{hint}"
