"""Run in a process of its own, to be interrupted: the command line, once it has said that it is ready.

python tests/experiments/cli/interrupted.py ARGUMENT...
"""

import sys

from factorized.experiments.cli import main
from factorized.experiments.training.interrupt import OneInterrupt


class Telling(OneInterrupt):
    """Says when it is in place."""

    def install(self) -> None:
        super().install()
        print("ready", flush=True)


if __name__ == "__main__":
    main.OneInterrupt = Telling  # type: ignore[misc]
    sys.exit(main.main())
