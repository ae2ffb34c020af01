"""The report of an experiment: tables, figures, REPORT.md and one self-contained report.html."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import jinja2

from normexp.analysis import provenance, target
from normexp.analysis.figures import WrittenFigure, write_figures
from normexp.analysis.load import Results, load_results
from normexp.analysis.render import Table, render_csv, render_markdown
from normexp.analysis.tables import build_tables, write_tables
from normexp.records.store import write_whole

TABLES_FOLDER = "tables"
FIGURES_FOLDER = "figures"


def write_report(experiment_dir: Path | str) -> Path:
    """Write tables, figures and both reports of an experiment from its records alone.

    The same records give the same bytes. Nothing but ``tables/``, ``figures/``, ``REPORT.md``
    and ``report.html`` is written, and each file appears whole.

    Args:
        experiment_dir: Folder that holds ``experiment.json`` and ``runs/``.

    Returns:
        The path of ``report.html``.

    Raises:
        UserError: If the records cannot be read or contradict each other, or the plan names a
            figure that does not exist.
    """
    results = load_results(experiment_dir)
    tables = build_tables(results)
    write_tables(tables, results.directory / TABLES_FOLDER)
    names = results.plan.get("figures")
    figures = write_figures(results, results.directory / FIGURES_FOLDER, names)
    content = _collect(results, tables, figures)
    for template, name in (("REPORT.md.j2", "REPORT.md"), ("report.html.j2", "report.html")):
        text = _environment(is_html=name.endswith("html")).get_template(template).render(content)
        write_whole(results.directory / name, text)
    return results.directory / "report.html"


def _collect(results: Results, tables: list[Table], figures: list[WrittenFigure]) -> dict[str, Any]:
    """Return everything that the templates show."""
    main, *others = tables
    plan = results.plan
    return {
        "title": plan.get("title") or results.name,
        "name": results.name,
        "question": plan.get("question"),
        "expected": plan.get("expected"),
        "target": target.describe_target(results),
        "command": plan.get("command"),
        "counts": provenance.count_statuses(results),
        "warnings": provenance.list_warnings(results),
        "main": main,
        "others": [table for table in others if table.rows],
        "figures": [figure for figure in figures if not figure.skipped],
        "missing": provenance.describe_missing(results),
        "unfinished": provenance.list_unfinished(results),
        "settings": provenance.list_settings(results),
        "conditions": provenance.list_conditions(results),
        "not_measured": provenance.list_not_measured(results, figures),
        "wall_time": provenance.describe_wall_time(results),
        "sources": provenance.build_sources_table(results, main.frame),
    }


def _environment(*, is_html: bool) -> jinja2.Environment:
    """Return the template engine; in HTML every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["markdown"] = render_markdown
    environment.filters["data_uri"] = _data_uri
    environment.filters["csv_uri"] = _csv_uri
    return environment


def _data_uri(path: Path) -> str:
    """Return an SVG file as a link that needs no file: ids of two figures never meet."""
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def _csv_uri(table: Table) -> str:
    """Return a table's full numbers as a link that needs no file."""
    return "data:text/csv;base64," + base64.b64encode(render_csv(table.frame).encode()).decode()
