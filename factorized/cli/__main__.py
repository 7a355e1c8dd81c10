"""``python -m factorized.cli``: the same as the command ``factorized``."""

import sys

from factorized.cli.main import main

sys.exit(main())
