"""The public names, in the order of the data path; see docs/path.md for the tour."""

from factorized.attention.register import register_attention
from factorized.decay.forms import Form, forms
from factorized.decay.frobenius import FrobeniusDecay, decoupled_frobenius
from factorized.decay.groups import parameter_groups
from factorized.decay.penalty import NuclearDecay, ProductPenalty
from factorized.diagnostics.bounds import MarginBounds, margin_bounds
from factorized.diagnostics.diagnose import Diagnosis, diagnose
from factorized.diagnostics.match import NormMatcher
from factorized.diagnostics.summary import Summary, summary
from factorized.files.checkpoint import load, save
from factorized.files.dense import load_dense
from factorized.files.pretrained import from_pretrained, save_plan, save_pretrained
from factorized.formats.kronecker import Kronecker
from factorized.formats.monarch import Monarch
from factorized.formats.product import LowRank, Overcomplete
from factorized.formats.residual import Residual
from factorized.formats.tensor_train import TensorTrain
from factorized.formats.tucker import Tucker
from factorized.nn.autotune import autotune
from factorized.nn.conv import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d
from factorized.nn.conv_transpose import (
    FactorizedConvTranspose1d,
    FactorizedConvTranspose2d,
    FactorizedConvTranspose3d,
)
from factorized.nn.drop_connect import drop_connect
from factorized.nn.embedding import FactorizedEmbedding
from factorized.nn.embedding_bag import FactorizedEmbeddingBag
from factorized.nn.linear import FactorizedLinear
from factorized.nn.parallel import ColwiseParallel, RowwiseParallel
from factorized.optim.flambe import Flambe
from factorized.optim.lamb import Lamb
from factorized.planning.calibration import Calibrated
from factorized.planning.plan import AttentionEntry, Plan, PlanEntry
from factorized.planning.planner import plan
from factorized.surgery.compose import compose
from factorized.surgery.factorize import factorize
from factorized.surgery.lower import lower
from factorized.surgery.shrink import factorize_attention, spectral_init_attention
from factorized.surgery.truncate import truncate
from factorized.version import __version__

__all__ = [  # noqa: RUF022, in path order
    "plan",
    "Plan",
    "PlanEntry",
    "AttentionEntry",
    "LowRank",
    "Overcomplete",
    "TensorTrain",
    "Tucker",
    "Monarch",
    "Kronecker",
    "Residual",
    "factorize",
    "Calibrated",
    "FactorizedLinear",
    "FactorizedConv1d",
    "FactorizedConv2d",
    "FactorizedConv3d",
    "FactorizedConvTranspose1d",
    "FactorizedConvTranspose2d",
    "FactorizedConvTranspose3d",
    "FactorizedEmbedding",
    "FactorizedEmbeddingBag",
    "register_attention",
    "factorize_attention",
    "spectral_init_attention",
    "autotune",
    "drop_connect",
    "ColwiseParallel",
    "RowwiseParallel",
    "forms",
    "Form",
    "parameter_groups",
    "FrobeniusDecay",
    "decoupled_frobenius",
    "ProductPenalty",
    "NuclearDecay",
    "Lamb",
    "Flambe",
    "compose",
    "lower",
    "truncate",
    "save",
    "load",
    "load_dense",
    "save_pretrained",
    "from_pretrained",
    "save_plan",
    "summary",
    "Summary",
    "diagnose",
    "Diagnosis",
    "margin_bounds",
    "MarginBounds",
    "NormMatcher",
    "__version__",
]
