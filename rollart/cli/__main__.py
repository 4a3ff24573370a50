"""`python -m rollart.cli`: the same as `rollart`."""

import sys

from rollart.cli import main

sys.exit(main())
