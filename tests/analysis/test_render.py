from __future__ import annotations

import re

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from normexp.analysis.render import (
    Table,
    escape_latex,
    render_csv,
    render_latex,
    render_markdown,
)


@given(st.floats(allow_nan=False))
def test_every_float_survives_csv(value: float) -> None:
    text = render_csv(pd.DataFrame({"x": [value]})).splitlines()[1]
    assert float(text) == value
    assert "np." not in text


@given(st.text(alphabet='ab\\{}$&#_%~^<>|"[]-', max_size=12))
def test_escaped_text_has_no_bare_special_character(text: str) -> None:
    words = r"\\text(backslash|asciitilde|asciicircum|less|greater|bar)\{\}|\\char34\{\}"
    rest = re.sub(r"\\[&%$#_{}]", "", re.sub(words, "", escape_latex(text)))
    assert not set(rest) & set('\\{}$&#_%~^<>|"')
    assert rest == "".join(c for c in text if c in "ab[]-")


def test_an_empty_table_is_told_as_such() -> None:
    table = Table("x", "X", "Nothing.", pd.DataFrame(), ("norm",), ())
    assert render_markdown(table) == "No rows.\n"
    assert "No rows." in render_latex(table)


def test_a_bar_in_a_cell_breaks_no_markdown() -> None:
    table = Table("x", "X", "", pd.DataFrame(), ("a", "b"), (("1|2", "3"),))
    assert render_markdown(table).splitlines()[2] == r"| 1\|2 | 3   |"
