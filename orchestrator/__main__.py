"""`python -m orchestrator` is `waypost`."""

import sys

from orchestrator.cli import main

if __name__ == "__main__":
    sys.exit(main())
