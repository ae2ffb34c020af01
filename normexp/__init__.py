"""normexp: compare normalizations in training."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normexp.norms.freezing import freeze_norms
    from normexp.norms.replace import Replacement, replace_norms

__all__ = ["Replacement", "__version__", "freeze_norms", "replace_norms"]

try:
    __version__ = version("normexp")
except PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use, so that the command line starts without it."""
    if name in ("Replacement", "replace_norms"):
        return getattr(import_module("normexp.norms.replace"), name)
    if name == "freeze_norms":
        return import_module("normexp.norms.freezing").freeze_norms
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
