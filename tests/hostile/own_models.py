"""Files with models of a user's own, each wrong in a way of its own; nothing here is imported by the tests."""

from __future__ import annotations

OWN = """
import os, sys
import torch
from torch import nn

CONSTANT = 3

def layers(classes): return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))

def raises_value(classes): raise ValueError("my own words")
def raises_runtime(classes): raise RuntimeError("first line\\nsecond line")
def raises_key(classes): raise KeyError("width")
def raises_nothing_said(classes): raise ZeroDivisionError
def raises_type(classes): return nn.Linear("64", classes)
def raises_attribute(classes): return nn.Nothing(classes)
def raises_assertion(classes): assert classes == 11
def raises_import(classes): import not_installed_anywhere
def raises_memory(classes): raise MemoryError
def raises_stop(classes): raise StopIteration
def raises_not_implemented(classes): raise NotImplementedError
def raises_unicode(classes): return b"\\xff".decode()
def raises_file(classes): return open("nowhere.pt")
def exits(classes): sys.exit(3)
def exits_well(classes): sys.exit(0)
def exits_with_words(classes): raise SystemExit("bye")
def recurses(classes): return recurses(classes)
def returns_nothing(classes): pass
def returns_class(classes): return nn.Linear
def returns_list(classes): return [layers(classes)]
def returns_text(classes): return "resnet8"
def returns_state(classes): return layers(classes).state_dict()
def takes_nothing(): return nn.Linear(64, 10)
def takes_number(number): return layers(number)
def takes_more(classes, width): return nn.Linear(width, classes)
def yields(classes): yield layers(classes)

def no_parameters(classes): return nn.Flatten()
def no_layers(classes): return nn.Sequential()
def frozen(classes): return layers(classes).requires_grad_(False)
def too_many_answers(classes): return layers(classes + 1)
def other_inputs(classes): return nn.Sequential(nn.Flatten(), nn.Linear(65, 32), nn.ReLU(), nn.Linear(32, classes))
def not_a_number(classes):
    network = layers(classes)
    nn.init.constant_(network[1].weight, float("nan"))
    return network
def infinite(classes):
    network = layers(classes)
    nn.init.constant_(network[1].weight, float("inf"))
    return network
def without_memory(classes): return layers(classes).to("meta")
def lazy(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(32), nn.LazyLinear(classes))
def double(classes): return layers(classes).double()
def enormous(classes): return nn.Linear(10**7, 10**7)

class Forward(nn.Sequential):
    answer = staticmethod(lambda x: x)
    def forward(self, x): return self.answer(super().forward(x))

def answering(answer, classes):
    network = Forward(*layers(classes))
    network.answer = answer
    return network

def answers_pair(classes): return answering(lambda x: (x, x), classes)
def answers_mapping(classes): return answering(lambda x: {"logits": x}, classes)
def answers_nothing(classes): return answering(lambda x: None, classes)
def answers_number(classes): return answering(lambda x: x.mean(), classes)
def answers_each(classes): return answering(lambda x: x[0], classes)
def answers_whole_numbers(classes): return answering(lambda x: x.long(), classes)
def answers_flat(classes): return answering(lambda x: x.flatten(), classes)
def answers_detached(classes): return answering(lambda x: x.detach(), classes)
def forward_raises_key(classes): return answering(lambda x: {}["logits"], classes)
def forward_raises_type(classes): return answering(lambda x: x + "1", classes)
def forward_raises_attribute(classes): return answering(lambda x: x.logits, classes)
def forward_raises_index(classes): return answering(lambda x: x[:, 99], classes)
def forward_raises_assertion(classes): return answering(lambda x: torch.testing.assert_close(x, x + 1), classes)
def forward_exits(classes): return answering(lambda x: sys.exit(0), classes)
def no_forward(classes):
    network = nn.Module()
    network.weight = nn.Parameter(torch.ones(classes))
    return network
"""
FILES = {
    "own.py": OWN,
    "own_syntax.py": "def small(classes:\n    return 1\n",
    "own_indent.py": "def small(classes):\nreturn 1\n",
    "own_imports.py": "import not_installed_anywhere\n",
    "own_imports_from.py": "from torch import nothing_of_this_name\n",
    "own_raises.py": "raise RuntimeError('while imported')\n",
    "own_divides.py": "small = 1 / 0\n",
    "own_exits.py": "import sys\nsys.exit(0)\n",
    "own_itself.py": "from own_itself import small\n",
    "own_zeros.py": "\0\0\0",
}
# Answers that a plan, which looks at weights alone, never meets.
ONLY_TRAINED = tuple(
    line.split("(")[0].removeprefix("def ")
    for line in OWN.splitlines()
    if line.startswith(("def answers_", "def forward_", "def too_many", "def other_inputs", "def no_forward"))
)
ONLY_TRAINED = (*ONLY_TRAINED, "frozen", "double", "without_memory")
FUNCTIONS = tuple(
    line.split("(")[0].removeprefix("def ")
    for line in OWN.splitlines()
    if line.startswith("def ") and not line.startswith(("def layers", "def answering"))
)
NAMES = (
    *(f"own:{name}" for name in FUNCTIONS),
    *(f"{file.removesuffix('.py')}:small" for file in FILES if file != "own.py"),
    *("own:", ":small", ":", "own:nothing", "own:CONSTANT", "own:os", "own:a:b", "own:nn.Linear", "nowhere:small"),
    *("own.small", "own.deeper:small", "..own:small", "own.py:small", "./own:small", "own small", "hf:", "hf:nowhere"),
    *("hf:empty", "hf:own.py", "hf:photos", "resnet9", "ResNet8", "resnet8 ", "notes.txt"),
)
