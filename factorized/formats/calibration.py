"""Approximations that keep a layer's outputs: ``E‖(W - W')x‖²`` over inputs ``x`` whose second moment is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from factorized.formats.kernel import KernelShape, to_matrix
from factorized.formats.svd import truncated_factors

# Added to the moments, as a share of the outputs: directions that no input has are kept by the size of their weights.
RIDGE = 1e-8
# Corrections of a weight cost this share of the mean square of its inputs: few samples would overstate them.
CAUTION = 1e-4
# Alternating least squares stops once a sweep over all cores lowers the error by less than this share of it.
SWEEPS, WORTH_A_SWEEP = 8, 0.01
# Conjugate gradient steps for one core. Each lowers the error, so that few of them do no harm. They end where the
# squared gradient is this share of the first: what is left is rounding.
STEPS, SOLVED = 12, 1e-24


@dataclass(frozen=True)
class Moment:
    """The second moment ``Σ x xᵀ`` of the inputs that a weight is applied to, summed over all of them, in float64.

    The inputs of a weight (out, in/groups, *size) are patches (in/groups, *size). A transposed weight (in, out/groups,
    *size), such as an embedding's table, has its inputs along the first dimension and the spatial ones.
    """

    sums: Tensor  # (groups, inputs, inputs), or (1, inputs) where it is diagonal
    transposed: bool = False

    def apply(
        self,
        weight: Tensor,  # of the shape of the layer's weight
        shape: KernelShape,
    ) -> Tensor:  # like weight
        """Return the weight times the moment: half the gradient of ``Σ ‖weight·x‖²``."""
        moved = _times(by_output(weight, shape, self.transposed), self.sums)
        return _as_weight(moved, shape, self.transposed)

    def of_matrix(self, shape: KernelShape) -> Tensor:  # (groups, side, side), or (1, side)
        """Return the moment for one side of the matrix that the weight is read as: its columns, or its rows.

        The spatial dimensions of the other side are summed over, as if inputs were uncorrelated along them.
        """
        rows, columns = prod(shape.row_size), prod(shape.column_size)
        if self.is_exact(shape):
            return self.sums
        split = self.sums.unflatten(2, (-1, rows, columns)).unflatten(1, (-1, rows, columns))
        summed = torch.einsum("giabjcb->giajc" if self.transposed else "giabjac->gibjc", split)
        return summed.flatten(3, 4).flatten(1, 2)

    def is_exact(self, shape: KernelShape) -> bool:
        """Return whether ``of_matrix`` has nothing to sum over."""
        return prod(shape.column_size if self.transposed else shape.row_size) == 1


def by_output(
    weight: Tensor,  # of the shape of the layer's weight
    shape: KernelShape,
    transposed: bool,
) -> Tensor:  # (groups, outputs, inputs)
    """Return the matrices that inputs are multiplied by."""
    lead, second, *size = shape.weight_shape
    split = weight.reshape(shape.groups, lead // shape.groups, second, prod(size))
    return (split.transpose(1, 2) if transposed else split).flatten(2)


def _as_weight(
    matrices: Tensor,  # (groups, outputs, inputs)
    shape: KernelShape,
    transposed: bool,
) -> Tensor:  # of the shape of the layer's weight
    """Return the weight whose ``by_output`` this is."""
    if transposed:
        matrices = matrices.unflatten(2, (shape.weight_shape[0] // shape.groups, -1)).transpose(1, 2)
    return matrices.reshape(shape.weight_shape)


def output_error(
    difference: Tensor,  # of the shape of the layer's weight
    moments: Sequence[Moment],
    shape: KernelShape,
) -> Tensor:  # ()
    """Return ``Σ ‖difference·x‖²`` over all inputs."""
    return (difference * weighed(difference, moments, shape)).sum()


def weighed(weight: Tensor, moments: Sequence[Moment], shape: KernelShape) -> Tensor:  # like weight
    """Return the weight times every moment: layers that share a weight add up their errors."""
    return torch.stack([moment.apply(weight, shape) for moment in moments]).sum(0)


def added(moments: Sequence[Moment]) -> list[Moment]:
    """Return the sums of the moments that are of one kind."""
    kinds: dict[tuple[bool, int], list[Tensor]] = {}
    for moment in moments:
        kinds.setdefault((moment.transposed, moment.sums.dim()), []).append(moment.sums)
    return [Moment(torch.stack(sums).sum(0), transposed) for (transposed, _), sums in kinds.items()]


def scaled(moment: Moment, by: float) -> Moment:
    """Return the moment of inputs whose squares count this many times."""
    return Moment(by * moment.sums, moment.transposed)


def regularized(
    moment: Moment,
    weight: Tensor,  # of the shape of the layer's weight
    shape: KernelShape,
) -> Moment:
    """Return the moment with a small multiple of the identity added, which raises ``Σ ‖weight·x‖²`` by a small share.

    A group whose outputs are zero gets the mean share; where every output is zero, add the identity.
    """
    sums, W = moment.sums, by_output(weight, shape, moment.transposed)
    outputs, sizes = (_times(W, sums) * W).sum((-2, -1)), W.square().sum((-2, -1))  # (groups,)
    mean = torch.where(outputs.sum() > 0, RIDGE * outputs.sum() / sizes.sum(), 1)
    ridge = torch.where(outputs > 0, RIDGE * outputs / sizes, mean).unsqueeze(-1)
    diagonal = sums if sums.dim() == 2 else sums.diagonal(dim1=-2, dim2=-1)
    added = ridge if sums.dim() == 2 else torch.diag_embed(ridge.expand_as(diagonal))
    return Moment(sums + added, moment.transposed)


def corrected(
    weight: Tensor,  # of the shape of the layer's weight
    cross: Tensor,  # (groups, inputs, inputs)
    moment: Moment,
    shape: KernelShape,
) -> Tensor:  # like weight
    """Return the weight that makes ``x̃`` into what this one makes of ``x``: it minimizes ``Σ ‖weight·x - W' x̃‖²``.

    ``cross`` is ``B = Σ x x̃ᵀ``, and ``moment`` is ``C`` of the ``x̃``. A small multiple of ``‖weight - W'‖²`` is added
    to what is minimized: ``W' = W (B + λI)(C + λI)⁻¹``. Directions that no ``x̃`` has keep their weights.
    """
    W, C = by_output(weight.double(), shape, moment.transposed), moment.sums
    mean = C.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # (groups, 1)
    ridge = torch.where(mean > 0, CAUTION * mean, 1).expand(-1, C.shape[-1])
    factor = torch.linalg.cholesky(C + torch.diag_embed(ridge))
    change = torch.cholesky_solve((W @ (cross - C)).mT, factor).mT
    return _as_weight(W + change, shape, moment.transposed).to(weight.dtype)


def calibrated_factors(
    W: Tensor,  # (groups, m, n)
    C: Tensor,  # (groups, n, n), or (1, n) where it is diagonal
    rank: int,
) -> tuple[Tensor, Tensor]:  # (groups, m, rank), (groups, n, rank)
    """Return the balanced factors of the product ``P`` of rank r that minimizes ``tr((W - P) C (W - P)ᵀ)``.

    The minimum is ``P = [W S]_r S⁻¹`` with ``C = S Sᵀ``: whiten, truncate, unwhiten. With the leading eigenvectors
    ``A`` of ``W C Wᵀ`` it is also ``A Aᵀ W``, which needs neither ``S`` nor its inverse: outputs are projected on
    their principal directions.
    """
    m, n = W.shape[-2:]
    if m > n:  # the outputs span n directions only
        Q, R = torch.linalg.qr(W)
        U, V = calibrated_factors(R, C, rank)
        return Q @ U, V
    A = torch.linalg.eigh(_times(W, C) @ W.mT).eigenvectors[..., -rank:]
    return truncated_factors(A, W.mT @ A, rank)


def output_spectrum(
    weight: Tensor,  # of the shape of the layer's weight
    moments: Sequence[Moment],
    shape: KernelShape,
) -> Tensor:  # (full rank,)
    """Return what each rank of the best product keeps of ``Σ ‖weight·x‖²``, largest first; they add up to it.

    These are the squared singular values of the whitened weight, summed over groups. For weights without a closed form
    (``calibrated_factors``) they are approximate.
    """
    exact = weight.double()
    moments = [regularized(moment, exact, shape) for moment in moments]
    matrix = to_matrix(exact, shape)
    found = []
    for moment in moments:
        W = matrix.mT if moment.transposed else matrix
        W = W if W.shape[-2] <= W.shape[-1] else torch.linalg.qr(W).R
        values = torch.linalg.eigvalsh(_times(W, moment.of_matrix(shape)) @ W.mT).clamp(min=0)
        found.append(values.flip(-1).sum(0))
    spectrum = torch.stack(found).sum(0)
    return spectrum * (output_error(exact, moments, shape) / spectrum.sum().clamp(min=torch.finfo(spectrum.dtype).tiny))


def refined(
    compose: Callable[[Sequence[Tensor]], Tensor],
    cores: Sequence[Tensor],
    weight: Tensor,  # (out, in/groups, *size)
    moments: Sequence[Moment],
    shape: KernelShape,
) -> tuple[Tensor, ...]:  # like cores
    """Return cores with a smaller output error, by alternating least squares; ``compose`` is linear in every core."""
    found = list(cores)
    error = output_error(weight - compose(found), moments, shape)
    for _ in range(SWEEPS):
        before = error
        for place in range(len(found)):
            tried = [*found[:place], _solved(compose, found, place, weight, moments, shape), *found[place + 1 :]]
            after = output_error(weight - compose(tried), moments, shape)
            if after < error:  # rounding may raise it
                found, error = tried, after
        if not error < (1 - WORTH_A_SWEEP) * before:
            break
    return tuple(found)


def _solved(
    compose: Callable[[Sequence[Tensor]], Tensor],
    cores: Sequence[Tensor],
    place: int,
    weight: Tensor,
    moments: Sequence[Moment],
    shape: KernelShape,
) -> Tensor:
    """Return one core after some conjugate gradient steps on the output error; the other cores stay."""

    def expand(core: Tensor) -> Tensor:
        return compose([*cores[:place], core, *cores[place + 1 :]])

    core = cores[place].detach()
    leaf = core.clone().requires_grad_()
    with torch.enable_grad():
        composed = expand(leaf)

    def pull_back(at: Tensor) -> Tensor:
        return torch.autograd.grad(composed, leaf, at, retain_graph=True)[0]

    residual = pull_back(weighed(weight - composed.detach(), moments, shape))
    direction, size = residual, residual.square().sum()
    least = SOLVED * size
    for _ in range(STEPS):
        moved = expand(direction)
        gradient = weighed(moved, moments, shape)
        curvature = (moved * gradient).sum()
        if not curvature > 0 or not size > least:  # nothing is left to gain
            break
        step = size / curvature
        core, residual = core + step * direction, residual - step * pull_back(gradient)
        size, last = residual.square().sum(), size
        direction = residual + size / last * direction
    return core


def _times(W: Tensor, C: Tensor) -> Tensor:  # (groups, m, n)
    return W * C.unsqueeze(-2) if C.dim() == 2 else W @ C
