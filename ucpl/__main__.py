"""`python -m ucpl` is `ucpl`."""

import sys

from ucpl.cli import main

sys.exit(main())
