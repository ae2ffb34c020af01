"""From the records of runs to tables, figures and a report."""

from __future__ import annotations

from normexp.analysis.load import Results, load_results

__all__ = ["Results", "load_results"]
