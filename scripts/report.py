"""Write an experiment's report: the same as `normexp report`."""

import sys

from normexp.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "report")
    main()
