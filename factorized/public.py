"""The public names, in the order of the data path; see docs/path.md for the tour."""

from factorized.adapters.table import register_attention
from factorized.decay.forms import Form, TensorForm, forms
from factorized.decay.frobenius import FrobeniusDecay, decoupled_frobenius
from factorized.decay.groups import parameter_groups
from factorized.decay.penalty import NuclearDecay, ProductPenalty
from factorized.deploy.checkpoint import load, save
from factorized.deploy.compose import compose
from factorized.deploy.dense import load_dense
from factorized.deploy.lower import lower
from factorized.deploy.pretrained import from_pretrained, save_pretrained
from factorized.diagnostics.bounds import MarginBounds, margin_bounds
from factorized.diagnostics.diagnose import Diagnosis, diagnose
from factorized.diagnostics.match import NormMatcher
from factorized.layers.autotune import autotune
from factorized.layers.conv import FactorizedConv1d, FactorizedConv2d, FactorizedConv3d
from factorized.layers.drop_connect import drop_connect
from factorized.layers.embedding import FactorizedEmbedding
from factorized.layers.linear import FactorizedLinear
from factorized.layers.shrink import factorize_attention, spectral_init_attention
from factorized.layers.swap import factorize
from factorized.layers.tensor_conv import TensorizedConv2d
from factorized.layers.tensor_linear import TensorizedLinear
from factorized.optim.flambe import Flambe
from factorized.optim.lamb import Lamb
from factorized.planning.plan import Plan, PlanEntry, TensorEntry
from factorized.planning.planner import plan
from factorized.planning.scheme import LowRank, Overcomplete
from factorized.planning.tensor_scheme import TensorTrain, Tucker
from factorized.version import __version__

__all__ = [  # noqa: RUF022, in path order
    "plan",
    "Plan",
    "PlanEntry",
    "TensorEntry",
    "LowRank",
    "Overcomplete",
    "TensorTrain",
    "Tucker",
    "factorize",
    "FactorizedLinear",
    "FactorizedConv1d",
    "FactorizedConv2d",
    "FactorizedConv3d",
    "FactorizedEmbedding",
    "TensorizedLinear",
    "TensorizedConv2d",
    "register_attention",
    "factorize_attention",
    "spectral_init_attention",
    "autotune",
    "drop_connect",
    "forms",
    "Form",
    "TensorForm",
    "parameter_groups",
    "FrobeniusDecay",
    "decoupled_frobenius",
    "ProductPenalty",
    "NuclearDecay",
    "Lamb",
    "Flambe",
    "compose",
    "lower",
    "save",
    "load",
    "load_dense",
    "save_pretrained",
    "from_pretrained",
    "diagnose",
    "Diagnosis",
    "margin_bounds",
    "MarginBounds",
    "NormMatcher",
    "__version__",
]
