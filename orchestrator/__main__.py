"""`python -m orchestrator` is `waypost`."""

import sys

if __name__ == "__main__":
    try:
        from orchestrator.cli import main

        sys.exit(main())
    except KeyboardInterrupt:  # while it is still loading
        sys.exit(130)
