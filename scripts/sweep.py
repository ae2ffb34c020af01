"""Train a grid: the same as `normexp sweep`."""

import sys

from normexp.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "sweep")
    main()
