"""Every architecture of the zoo: one class of transformers each."""

from __future__ import annotations

from tests.integrations.zoo import causal, images, masked, other_inputs, text_to_text

MODELS = [*masked.MODELS, *causal.MODELS, *text_to_text.MODELS, *images.MODELS, *other_inputs.MODELS]
