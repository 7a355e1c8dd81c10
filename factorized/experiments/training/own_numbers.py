"""Random numbers of a process's or a run's own, from torch's default generators."""

from __future__ import annotations

import torch


class OwnNumbers:
    """While entered, torch's default generator of a device draws other numbers than outside, and goes on with them.

    Dropout and compiled code draw from the default generators alone. A CUDA graph must not be captured inside.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = default_generator(device).get_state()  # of the numbers that are not drawn at present
        self._generator = default_generator(device)

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *exception: object) -> None:
        self._swap()

    def seed(self, number: int) -> None:
        """Begin the numbers that are drawn inside with a seed."""
        self.state = torch.Generator(self._generator.device).manual_seed(number).get_state()

    def _swap(self) -> None:
        kept, self.state = self.state, self._generator.get_state()
        self._generator.set_state(kept)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that work on ``device`` draws from where none is named."""
    if device.type != "cuda":
        return torch.default_generator
    number = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[number]
