"""`python -m fxwrap`."""

import sys

from fxwrap.cli import main

sys.exit(main(sys.argv[1:]))
