"""``python -m factorized``: the same as the command ``factorized``."""

import sys

from factorized.experiments.cli.main import main

sys.exit(main())
