"""Run in a process of its own, to be interrupted: the command line, once it has said that it is ready.

python tests/cli/interrupted.py ARGUMENT...
"""

import sys

from factorized.cli.main import main
from factorized.vision.interrupt import OneInterrupt

if __name__ == "__main__":
    OneInterrupt().install()  # as main does first of all
    print("ready", flush=True)
    sys.exit(main())
