"""Hydra accepts launchers and sweepers from this namespace package only; the code is in normexp."""

from hydra.core.config_store import ConfigStore

from normexp.launch import local, sweeper


class LocalLauncher(local.LocalLauncher):
    """See ``normexp.launch.local.LocalLauncher``."""


class GridSweeper(sweeper.GridSweeper):
    """See ``normexp.launch.sweeper.GridSweeper``."""


# Plain nodes: Hydra runs this file outside of sys.modules, where dataclasses cannot be defined.
_store = ConfigStore.instance()
_store.store(
    group="hydra/launcher",
    name="local",
    node={
        "_target_": "hydra_plugins.normexp_plugins.LocalLauncher",
        "num_jobs": None,
        "fail_fast": False,
    },
    provider="normexp",
)
_store.store(
    group="hydra/sweeper",
    name="grid",
    node={"_target_": "hydra_plugins.normexp_plugins.GridSweeper"},
    provider="normexp",
)
