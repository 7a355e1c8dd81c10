"""Torch's encoders around shrunken attention: off the path for nested tensors, which it cannot take, and back on."""

from __future__ import annotations

from torch import nn

from factorized.layers.multihead import ShrunkenMultiheadAttention

_KEPT_OFF = "nested_before_shrinking"  # the mark of an encoder that took nested tensors before its attention could not


def keep_off_nested_tensors(model: nn.Module) -> None:
    """Keep torch's encoders that hold shrunken attention off the path for nested tensors, which it cannot take."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and encoder.use_nested_tensor and _holds_shrunken(encoder):
            encoder.use_nested_tensor = False
            encoder.__dict__[_KEPT_OFF] = True


def allow_nested_tensors(model: nn.Module) -> None:
    """Give that path back to encoders that were kept off it and hold no shrunken attention any more."""
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder) or _holds_shrunken(encoder):
            continue
        if encoder.__dict__.pop(_KEPT_OFF, False):
            encoder.use_nested_tensor = True


def _holds_shrunken(encoder: nn.Module) -> bool:
    return any(isinstance(module, ShrunkenMultiheadAttention) for module in encoder.modules())
