"""``fz.drop_connect``: dropping entries of the product instead of those of its factors."""

from __future__ import annotations

from factorized._checks import is_number
from factorized.nn.layer import FactorizedLayer
from factorized.nn.model import Model, check_model


def drop_connect(model: Model, share: float) -> Model:
    """Drop each entry of every product with probability ``share`` in training, scaling up the others; return the model.

    This is DropConnect (Wan et al., 2013) on the composed weight, as the paper's conclusion suggests. In training the
    layers compose their weight; in evaluation they run as before. Code that reads the ``weight`` of a layer, instead
    of calling the layer, gets all entries. ``share=0`` turns it off.

    Raises:
        ValueError: ``share`` is not in [0, 1), or ``model`` has no factorized layer.

    Examples:
        >>> model = nn.Sequential(fz.FactorizedLinear(64, 64, 8))
        >>> fz.drop_connect(model, 0.1)[0].drop_connect
        0.1
    """
    check_model(model)
    if not (is_number(share) and 0 <= share < 1):
        raise ValueError(f"share must be in [0, 1), got {share!r}")
    layers = [module for module in model.modules() if isinstance(module, FactorizedLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no factorized layer; call fz.factorize first")
    for layer in layers:
        layer.drop_connect = share
    return model
