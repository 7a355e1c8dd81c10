"""The names that ``build_model`` knows, in a separate file so that shell completion does not import torch."""

MOST_CLASSES = 1_000_000  # that a model is built for
MOST_VALUES = 2**26  # of an image

MODELS = (
    "resnet8",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet56",
    "resnet110",
    "resnet32x2",
    "vgg19",
    "wrn28-10",
)
