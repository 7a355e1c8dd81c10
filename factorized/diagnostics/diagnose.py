"""``fz.diagnose``: the quantities of the paper's figures 1 and 3, per product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from factorized._torch import all_finite, computable, full_precision
from factorized.decay.forms import Form, check_have_values, forms
from factorized.decay.strength import Number, check_number


@dataclass(frozen=True)
class Diagnosis:
    """Figures of one product W; the last three need an SVD and are None without ``spectrum=True``.

    If training diverged and the product is not finite, they are NaN or infinite.

    Attributes:
        name: the product's name, see ``fz.forms``.
        kind: its kind, such as ``"linear"`` or ``"ov"``.
        frobenius: ‖W‖_F.
        nuclear_bound: ½(‖U‖² + ‖V‖²) ≥ ‖W‖_*, which ordinary decay penalizes (equation 2); None for tensors and
            products with inner matrices, where decaying the factors does not bound such a norm.
        effective_step: η / ‖W‖²_F, the step size of the direction of a normalized layer (claim 3.1).
        non_orthogonality: ‖offdiag(UᵀU)‖ / ‖UᵀU‖, and the same of V; 0 at spectral initialization. For a tensor one
            figure for each core, along its last dimension.
        spectral: ‖W‖_2.
        nuclear: ‖W‖_*.
        stable_rank: ‖W‖²_F / ‖W‖²_2.

    Examples:
        >>> quick = fz.diagnose(nn.Sequential(fz.FactorizedLinear(64, 64, 8)), lr=0.1, spectrum=False)[0]
        >>> quick.effective_step > 0, quick.nuclear
        (True, None)
    """

    name: str
    kind: str
    frobenius: float
    nuclear_bound: float | None
    effective_step: float
    non_orthogonality: tuple[float, ...]
    spectral: float | None = None
    nuclear: float | None = None
    stable_rank: float | None = None


def diagnose(model: nn.Module, lr: Number, *, spectrum: bool = True) -> list[Diagnosis]:
    """Return a diagnosis of every product in ``model``, at learning rate ``lr``.

    ``spectrum=False`` leaves out what needs singular values (for a tensor, those of its weight's matrix, which is
    formed); the rest comes from rank × rank Gram matrices and can be tracked at every step. A batched form (groups,
    heads) counts as one block-diagonal matrix. Sharded factors are gathered, so all ranks must call it.

    Raises:
        ValueError: the model holds no products, or has no values, or ``lr`` is not a number.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> found = fz.diagnose(model, lr=0.1)[0]
        >>> found.name, found.kind, found.spectral <= found.frobenius <= found.nuclear
        ('0', 'linear', True)
    """
    check_number("lr", lr)
    found = forms(model)
    if not found:
        raise ValueError(f"{type(model).__name__} holds no products to diagnose; call fz.factorize first")
    check_have_values(found)
    return [_diagnose(form, float(lr), spectrum) for form in found]


@full_precision
@torch.no_grad()
def _diagnose(form: Form, lr: float, spectrum: bool) -> Diagnosis:
    factors = [computable(value) for value in form.values]
    squared = form.norm_squared(factors).sum()
    ends = (factors[0], factors[-1])
    spectral = nuclear = stable = None
    if spectrum and not all(map(all_finite, factors)):
        spectral = nuclear = stable = float("nan")
    elif spectrum:
        values = form.spectrum(factors)
        spectral, nuclear = values.max().item(), values.sum().item()
        stable = squared.item() / spectral**2 if spectral else 0.0
    unfolded = [factor.flatten(0, -2) for factor in factors]
    return Diagnosis(
        name=form.name,
        kind=form.kind,
        frobenius=squared.sqrt().item(),
        nuclear_bound=None if not form.is_product or len(factors) > 2 else _nuclear_bound(*ends),
        effective_step=lr / squared.item() if squared else float("inf"),
        non_orthogonality=tuple(_non_orthogonality(matrix) for matrix in (ends if form.is_product else unfolded)),
        spectral=spectral,
        nuclear=nuclear,
        stable_rank=stable,
    )


def _nuclear_bound(U: Tensor, V: Tensor) -> float:
    # A matrix that several products share counts once for each.
    squares = U.square().sum(dim=(-2, -1)), V.square().sum(dim=(-2, -1))
    return ((squares[0] + squares[1]).sum() / 2).item()


def _non_orthogonality(factor: Tensor) -> float:
    gram = factor.mT @ factor
    diagonal = torch.diagonal(gram, dim1=-2, dim2=-1)
    whole = gram.square().sum()
    return ((whole - diagonal.square().sum()).clamp(min=0) / whole).sqrt().item() if whole else 0.0
