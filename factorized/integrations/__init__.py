"""Thin adapters to other packages; ``fz.integrations`` imports each when one of its names is first used."""

import importlib
import typing

if typing.TYPE_CHECKING:
    # "as" makes a name public for type checkers
    from factorized.integrations.decoding import fuse_decoder as fuse_decoder
    from factorized.integrations.lightning import FactorizeCallback as FactorizeCallback
    from factorized.integrations.lightning import restore_plan as restore_plan
    from factorized.integrations.masks import skip_masks as skip_masks
    from factorized.integrations.peft import on_factorized as on_factorized
    from factorized.integrations.transformers import FactorizedTrainerMixin as FactorizedTrainerMixin
    from factorized.integrations.transformers import resize_token_embeddings as resize_token_embeddings
else:
    HOMES = {
        "FactorizedTrainerMixin": "transformers",
        "resize_token_embeddings": "transformers",
        "FactorizeCallback": "lightning",
        "restore_plan": "lightning",
        "on_factorized": "peft",
        "skip_masks": "masks",
        "fuse_decoder": "decoding",
    }

    def __getattr__(name: str) -> object:
        if name not in HOMES:
            raise AttributeError(f"module 'factorized.integrations' has no attribute {name!r}")
        return getattr(importlib.import_module(f"factorized.integrations.{HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return list(HOMES)
