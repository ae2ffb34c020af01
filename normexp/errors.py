"""The one error that a user's input can cause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input, told in one line: which key, which value, what would be right.

    The command line prints the line and exits with code 2; no traceback is shown.

    Args:
        key: Dotted configuration key or the command-line argument at fault.
        value: The value found there.
        expected: What would be right, as the end of the sentence.

    Examples:
        >>> str(UserError("norm", "grup_norm", "did you mean group_norm?"))
        'norm=grup_norm: did you mean group_norm?'
    """

    def __init__(self, key: str, value: object, expected: str) -> None:
        self.key = key
        self.value = value
        self.expected = expected
        super().__init__(key, value, expected)

    def __str__(self) -> str:
        return " ".join(f"{self.key}={self.value}: {self.expected}".split())


class HeldElsewhereError(UserError):
    """Another process holds what this one wants to write; it is no fault of the work itself."""


def choices_hint(value: object, choices: Iterable[str]) -> str:
    """Return the end of an error line: close matches first, then every choice.

    Args:
        value: What the user wrote.
        choices: All names that would have been accepted.

    Examples:
        >>> choices_hint("grup_norm", ["batch_norm", "group_norm"])
        'did you mean group_norm? choices: batch_norm, group_norm'
    """
    names = sorted(choices)
    close = difflib.get_close_matches(str(value), names, n=3, cutoff=0.55)
    listed = f"choices: {', '.join(names)}" if names else "there are no choices"
    return f"did you mean {' or '.join(close)}? {listed}" if close else listed
