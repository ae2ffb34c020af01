"""From the records of runs to tables, figures and a report. No torch, no Lightning, no Hydra."""

from __future__ import annotations

from normexp.analysis.console import print_summary
from normexp.analysis.figures import FIGURES
from normexp.analysis.load import Results, load_results
from normexp.analysis.report import write_report
from normexp.analysis.request import check_request

__all__ = ["FIGURES", "Results", "check_request", "load_results", "print_summary", "write_report"]
