"""``python -m normexp`` is ``normexp``."""

from normexp.cli.main import main

if __name__ == "__main__":
    main()
