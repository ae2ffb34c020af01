"""The numbers of the figure of initial gradients: which cells are one arm, and their norms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from normexp.analysis.aggregate import named_statistics
from normexp.analysis.display import show_value
from normexp.analysis.figures._intervals import write_runs
from normexp.analysis.figures._layout import describe_arm, describe_panel, panel_factors
from normexp.analysis.figures._registry import NotApplicable
from normexp.analysis.leaks import MARK, mark_name
from normexp.analysis.load import Results
from normexp.analysis.statistics import summarize

LAST_BRANCH = "initial_gradient/last_branch"
DEPTH = "model.depth"
NAME = "gradient_norm"
# What acts in updates and evaluations alone cannot change a gradient before the first update.
WITHOUT_EFFECT = (
    *("schedule", "optimizer", "lr_scaling", "budget", "num_evaluations", "evaluation"),
    *("accumulation_steps", "trainer", "probes"),
)
Runs = dict[int, float]


class Arm(NamedTuple):
    """What a cell is to this figure; of depth 0 where that is not known."""

    name: str
    norm: str
    depth: int


def frame(results: Results) -> pd.DataFrame:
    """Return one row an arm and depth, and one an arm and block of the deepest model.

    ``kind`` is ``depth`` for the gradient of the last branch's weights and ``block`` for that of
    all parameters of a block. Runs that differ only in what has no effect yet are one run.

    Raises:
        NotApplicable: If no run has the probe of initial gradients.
    """
    if results.gradients.empty:
        raise NotApplicable("no run has the probe initial_gradients")
    arms = _label_arms(results)
    last, blocks = _last_branches(results, arms), _blocks(results, arms)
    norms = {arm.name: arm.norm for arm in arms.values()}
    exponents = {name: _fit_exponents(last, name) for name in norms}
    deepest = max(arm.depth for arm in arms.values())
    rows = []
    for kind, found in (("depth", last), ("block", blocks)):
        for (name, place), values in found.items():
            slopes = exponents[name].values() if kind == "depth" else ()
            depth = place if kind == "depth" else deepest
            rows.append(
                {
                    "kind": kind,
                    "norm": norms[name],
                    "arm": name,
                    "depth": depth or None,
                    "block": place if kind == "block" else None,
                    **named_statistics(NAME, summarize(values.values())),
                    f"{NAME}_runs": write_runs(values),
                    **named_statistics("exponent", summarize(slopes)),
                }
            )
    if not rows:
        raise NotApplicable("the model names neither its blocks nor the end of its last branch")
    if not any(row[f"{NAME}_mean"] > 0 for row in rows):
        raise NotApplicable("no gradient is above 0")
    return pd.DataFrame(rows).astype({"depth": "Int64", "block": "Int64"})


def _fit_exponents(last: Mapping[tuple[str, int], Runs], arm: str) -> Runs:
    """Return the slope in logarithms by seed; none for seeds with fewer than two depths."""
    points: dict[int, list[tuple[float, float]]] = {}
    for (name, depth), values in last.items():
        for seed, value in values.items():
            if name == arm and depth > 0 and value > 0 and math.isfinite(value):
                points.setdefault(seed, []).append((math.log(depth), math.log(value)))
    slopes = {}
    for seed, found in points.items():
        x, y = np.array(sorted(found)).T
        if len(set(x)) > 1:
            x = x - x.mean()
            slopes[seed] = float((x @ (y - y.mean())) / (x @ x))
    return slopes


def _last_branches(results: Results, arms: Mapping[str, Arm]) -> dict[tuple[str, int], Runs]:
    """Return the gradient norm of the last branch's weights by arm and depth, one a seed."""
    found: dict[tuple[str, int], Runs] = {}
    runs = results.runs
    if LAST_BRANCH in results.metrics:
        for cell, seed, value in zip(runs["cell"], runs["seed"], runs[LAST_BRANCH], strict=True):
            if not math.isnan(value):
                place = (arms[cell].name, arms[cell].depth)
                found.setdefault(place, {}).setdefault(int(seed), float(value))
    return found


def _blocks(results: Results, arms: Mapping[str, Arm]) -> dict[tuple[str, int], Runs]:
    """Return the gradient norm of each block of the deepest models by arm, one a seed.

    Blocks are counted from 1, as layers are.
    """
    found: dict[tuple[str, int], Runs] = {}
    deepest = max(arm.depth for arm in arms.values())
    cells = {cell for cell, arm in arms.items() if arm.depth == deepest}
    rows = results.gradients
    rows = rows[rows["cell"].isin(cells) & rows["block"].notna()]
    norms: dict[tuple[str, int, int], list[float]] = {}
    columns = (rows[name] for name in ("cell", "seed", "block", "gradient_norm"))
    for cell, seed, block, norm in zip(*columns, strict=True):
        norms.setdefault((cell, int(seed), int(block) + 1), []).append(float(norm))
    for (cell, seed, block), parts in norms.items():
        place = (arms[cell].name, block)
        found.setdefault(place, {}).setdefault(seed, math.hypot(*parts))
    return found


def _label_arms(results: Results) -> dict[str, Arm]:
    """Return the arm of each cell: named by what can matter beside the depth."""
    cells = results.cells
    factors = [name for name in results.factors if not _is_without_effect(name)]
    settings = {c["cell"]: c.get("settings", {}).get(DEPTH) for c in results.plan["cells"]}
    varies = DEPTH in results.factors
    others = panel_factors(cells, factors, [DEPTH] if varies else [])
    by_norm = ["norm", *_norm_params(factors)]
    is_norm_told = not others or any(cells[f].map(show_value).nunique() > 1 for f in by_norm)
    arms = {}
    for _, row in cells.iterrows():
        words = [describe_arm(row, factors).removesuffix(f" {MARK}")] if is_norm_told else []
        if others == ["placement"]:
            words.append(show_value(row["placement"]))
        elif others:
            words.append(describe_panel(row, others))
        name = mark_name(", ".join(words), row["is_leaking"])
        depth = row[DEPTH] if varies else settings[row["cell"]]
        arms[str(row["cell"])] = Arm(name, str(row["norm"]), int(depth or 0))
    return arms


def _norm_params(factors: Sequence[str]) -> list[str]:
    """Return the factors that are parameters of the norm."""
    return [factor for factor in factors if factor.startswith("norm.")]


def _is_without_effect(factor: str) -> bool:
    """Return whether a factor cannot change a gradient before the first update."""
    return factor.partition(".")[0] in WITHOUT_EFFECT
