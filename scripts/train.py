"""Train one cell: the same as `normexp train`."""

import sys

from normexp.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
