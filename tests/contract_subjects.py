"""Norms under experiment, shared by tests: what is costly is found once a norm."""

from __future__ import annotations

from functools import cache

from normexp.contract import Subject
from normexp.norms import NORMS


@cache
def subject_of(name: str) -> Subject:
    """Return the one subject of a norm of ours."""
    return Subject(NORMS.get(name))
