"""normexp: compare normalizations in training."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("normexp")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+unknown"
