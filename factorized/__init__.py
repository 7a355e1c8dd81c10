"""Train neural networks whose weights are products: plan, factorize, train, compose.

``help(fz.plan)``, or that of any other public name, has its arguments, its errors and an example. Examples begin with::

    import factorized as fz
    import torch
    from torch import nn

The public names are those of ``factorized.public``. They are imported when one is first used, because torch takes
seconds to import, and ``factorized --help`` or shell completion do not need it.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from factorized import integrations as integrations
    from factorized.public import *  # noqa: F403
else:  # a type checker would accept any name because of this function

    def __getattr__(name: str) -> object:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module 'factorized' has no attribute {name!r}")
        if name == "integrations":
            return importlib.import_module("factorized.integrations")
        public = vars(importlib.import_module("factorized.public"))
        if name != "__all__" and name not in public["__all__"]:
            raise AttributeError(f"module 'factorized' has no attribute {name!r}")
        globals().update({shared: public[shared] for shared in ("__all__", *public["__all__"])})
        return public[name]


def __dir__() -> list[str]:
    return [*importlib.import_module("factorized.public").__all__, "integrations"]
