"""Build a model by name: the paper's, one that a function returns, or a Hugging Face model from a local folder."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch import nn

from factorized.experiments.data.explain import nearest, place_and_reason
from factorized.experiments.data.images import Images
from factorized.experiments.models.hugging_face import hugging_face_model, model_folder
from factorized.experiments.models.names import MODELS, MOST_CLASSES, MOST_VALUES
from factorized.experiments.models.resnet import resnet, resnet32x2
from factorized.experiments.models.vgg import vgg19_nfc
from factorized.experiments.models.wide_resnet import wide_resnet

# The function of a name takes classes, image size and channels.
_BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "resnet8": lambda classes, size, channels: resnet(8, classes, channels),
    "resnet20": lambda classes, size, channels: resnet(20, classes, channels),
    "resnet32": lambda classes, size, channels: resnet(32, classes, channels),
    "resnet44": lambda classes, size, channels: resnet(44, classes, channels),
    "resnet56": lambda classes, size, channels: resnet(56, classes, channels),
    "resnet110": lambda classes, size, channels: resnet(110, classes, channels),
    "resnet32x2": lambda classes, size, channels: resnet32x2(classes, channels),
    "vgg19": lambda classes, size, channels: vgg19_nfc(classes, _vgg_pool(size), channels),
    "wrn28-10": lambda classes, size, channels: wide_resnet(28, 10, classes, channels),
}


def build_model(name: str, classes: int, image_size: int = 32, channels: int = 3) -> nn.Module:
    """Return a freshly drawn model, from the current random state, that maps (batch, channels, size, size) to logits.

    ``name`` is one of ``MODELS``; ``module:function``, a function called with ``classes=``, and with ``image_size=``
    and ``channels=`` where it has such arguments; or ``hf:FOLDER``, a Hugging Face image classifier.
    """
    for argument, value in (("classes", classes), ("image_size", image_size), ("channels", channels)):
        if value < 1:
            raise ValueError(f"{argument} must be a whole number of at least 1, got {value!r}")
    if classes > MOST_CLASSES:
        raise ValueError(f"classes must be at most {MOST_CLASSES:,}, got {classes:,}")
    if (values := channels * image_size**2) > MOST_VALUES:
        raise ValueError(
            f"image_size={image_size} with channels={channels} makes images of {values:,} values; expected at most "
            f"{MOST_VALUES:,}"
        )
    if name.startswith("hf:"):
        return hugging_face_model(model_folder(name), classes, image_size, channels)
    if ":" in name:
        return _from_function(name, classes, image_size, channels)
    if name not in _BUILDERS:
        raise ValueError(
            f"model must be one of {', '.join(MODELS)}, a function as module:function or hf:FOLDER, got {name!r}"
            f"{nearest(name.lower(), MODELS, 0.4)}"
        )
    return _BUILDERS[name](classes, image_size, channels)


def build_for(name: str, images: Images) -> nn.Module:
    """Return ``build_model`` for the classes, size and channels of these images."""
    return build_model(name, len(images.classes), images.size[0], images.channels)


def _vgg_pool(size: int) -> int:
    if size < 16:
        raise ValueError(f"vgg19 halves an image four times and needs at least 16×16, got {size}×{size}; use resnet8")
    return size // 16


def _from_function(name: str, classes: int, image_size: int, channels: int) -> nn.Module:
    module_name, _, function_name = name.partition(":")
    is_file = module_name.endswith(".py") and Path(module_name).is_file()
    if is_file or not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise ValueError(f"model {name!r}: a function is named as module:function, such as mymodels:small")
    with _working_folder_on_path():
        module = _import(name, module_name)
        function = getattr(module, function_name, None)
        if not callable(function):
            functions = [key for key, found in vars(module).items() if callable(found)]
            meant = nearest(function_name, functions, 0.6)
            raise ValueError(f"model {name!r}: module {module_name!r} has no function {function_name!r}{meant}")
        offered = {"classes": classes, "image_size": image_size, "channels": channels}
        try:
            taken = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # built-in functions have no signature
            taken = []
        if "classes" not in taken:
            raise ValueError(f"model {name!r}: {function_name} must take classes=, it takes ({', '.join(taken)})")
        try:
            model = function(**{argument: value for argument, value in offered.items() if argument in taken})
        except (Exception, SystemExit) as error:  # it may do anything
            raise ValueError(f"model {name!r}: {function_name} failed {place_and_reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r}: {function_name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _import(name: str, module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may do anything while it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise ValueError(
                f"model {name!r}: there is no module {missing!r} here or on the Python path; install it, or put its "
                "folder on PYTHONPATH"
            ) from error
        raise ValueError(f"model {name!r}: importing {module_name} failed {place_and_reason(error)}") from error


@contextmanager
def _working_folder_on_path() -> Iterator[None]:
    """Put the working folder on the import path, as ``python -m`` does and an installed command does not."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
