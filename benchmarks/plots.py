"""Plots: a bar for each peer, the spread as a whisker, the device's limit as a line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

from benchmarks.meter import Spread
from benchmarks.results import DEVICE_PUT, LIMIT, OURS, Results

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

mpl.use("agg")

from matplotlib import pyplot as plt

COLOURS = {
    OURS: "#0072b2",
    "": "#b0b0b0",
    LIMIT: "#d55e00",
    DEVICE_PUT: "#e6c4b0",
}  # told apart by the colour-blind too
SMALL = 50_000_000
"""Bytes below which a rate says nothing, and times are drawn."""


def draw(results: Results, load: Workload, path: Path) -> None:
    """Draw one workload's save and restore beside each other."""
    verbs = ("save", "restore") if load.saving else ("restore",)
    bars = max(len(results.of(load, verb)) for verb in verbs)
    figure, axes = plt.subplots(
        1, len(verbs), figsize=(5.5 * len(verbs), 1.4 + 0.42 * bars), squeeze=False
    )
    for verb, axis in zip(verbs, axes[0], strict=True):
        _bars(axis, results, load, verb)
    figure.suptitle(f"({load.letter}) {load.title}", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bars(axis: Any, results: Results, load: Workload, verb: str) -> None:
    nbytes = load.nbytes if verb == "save" else load.wanted_nbytes
    rates = nbytes >= SMALL
    spreads = {
        peer: Spread.of([nbytes / f.seconds / 1e9 if rates else f.seconds for f in figures])
        for peer, figures in results.of(load, verb).items()
    }
    limit = spreads.pop(LIMIT, None)
    order = sorted(spreads, key=lambda peer: spreads[peer].median, reverse=not rates)
    medians = [spreads[peer].median for peer in order]
    whiskers = [
        [spreads[p].median - spreads[p].low for p in order],
        [spreads[p].high - spreads[p].median for p in order],
    ]
    colours = [COLOURS.get(peer, COLOURS[""]) for peer in order]
    axis.barh(order, medians, xerr=whiskers, color=colours, ecolor="#404040", capsize=2)
    ours = spreads[OURS].median if OURS in spreads else None
    for row, peer in enumerate(order):
        if ours and peer not in (OURS, DEVICE_PUT):
            ratio = ours / medians[row] if rates else medians[row] / ours
            axis.text(
                spreads[peer].high, row, f"  ckptio {ratio:.1f}× as fast", va="center", fontsize=8
            )
    if limit is not None and rates:
        axis.axvline(limit.median, color=COLOURS[LIMIT], linestyle="--", linewidth=1.2)
        axis.axvspan(limit.low, limit.high, color=COLOURS[LIMIT], alpha=0.12, linewidth=0)
        axis.set_xlabel(f"GB/s (dashed: the device's limit, {limit.median:.2f})")
    else:
        axis.set_xlabel("GB/s" if rates else "seconds")
    if not rates and medians and max(medians) > 20 * min(medians):
        axis.set_xscale("log")
    high = max(s.high for s in spreads.values())
    axis.set_xlim(
        right=max(
            high * (1.35 if axis.get_xscale() == "linear" else 4),
            limit.high * 1.05 if limit and rates else 0,
        )
    )
    axis.set_title("durable save" if verb == "save" else "cold restore", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
