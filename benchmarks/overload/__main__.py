"""Runs `python -m benchmarks.overload --url URL`; see `command`."""

import sys

from benchmarks.overload.command import main

if __name__ == "__main__":
    sys.exit(main())
