from __future__ import annotations

from collections.abc import Callable

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from normexp.config.choices import conf_dir
from normexp.config.compose import CONFIG_NAME, HYDRA_VERSION_BASE, register_schema

Compose = Callable[..., DictConfig]


@pytest.fixture(scope="session")
def composed() -> Compose:
    """Return a function that composes the shipped configuration with overrides."""

    def run(*overrides: str) -> DictConfig:
        register_schema()
        with initialize_config_dir(str(conf_dir()), version_base=HYDRA_VERSION_BASE):
            return compose(CONFIG_NAME, overrides=list(overrides))

    return run
