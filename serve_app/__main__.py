"""`python -m serve_app` runs the `windve` command where its script is not installed."""

import sys

from serve_app.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
