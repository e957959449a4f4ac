"""`python -m mlax` is the command `mlax`."""

import sys

from mlax.cli import main

if __name__ == "__main__":
    sys.exit(main())
