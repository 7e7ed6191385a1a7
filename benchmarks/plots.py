"""Plots: a bar for each peer, the spread as a whisker, the limit as a dashed line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.meter import Spread
from benchmarks.results import (
    DEVICE_PUT,
    LIMIT,
    OURS,
    SMALL,
    Results,
    Section,
    digits,
    seconds,
    slower,
)

mpl.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

# Told apart by the colour-blind too.
HIGHLIGHT, KIN, GREY, PALE, RED = "#0072b2", "#7ab4d8", "#b8bec4", "#e3d3c8", "#d55e00"
INK = "#333333"
VERBS = {
    "save": "durable save",
    "restore": "cold restore",
    "write": "durable write",
    "read": "read",
    "block": "until the caller may go on",
    "plan": "",
}
STYLE = {
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 9,
}


@dataclass(frozen=True)
class Scale:
    """What an axis shows.

    Attributes
    ----------
    unit : str
    nbytes, per : float
        A rate of so many bytes, in units of so many; seconds if there are none.
    """

    unit: str
    nbytes: int = 0
    per: float = 1.0

    @classmethod
    def of(cls, nbytes: int, fastest: float) -> Scale:
        if nbytes < SMALL:
            return cls("seconds")
        return cls("GB/s", nbytes, 1e9) if nbytes / fastest >= 1e9 else cls("MB/s", nbytes, 1e6)

    def shown(self, taken: Spread) -> Spread:
        """Return the times as they are shown."""
        if not self.nbytes:
            return taken
        rates = [self.nbytes / t / self.per for t in (taken.median, taken.high, taken.low)]
        return Spread(*rates)

    def text(self, value: float) -> str:
        if self.nbytes:
            return f"{value:.{2 if self.per > 1e6 else 0}f} {self.unit}"
        return f"{value:.{digits(value)}f} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"

    @property
    def label(self) -> str:
        return f"{self.unit} (more is better)" if self.nbytes else "seconds (less is better)"


def draw(results: Results, section: Section, path: Path) -> None:
    """Draw a section: a panel for each verb, one below the other."""
    verbs = [verb for verb in section.nbytes if results.of(section, verb)]
    if not verbs:
        return
    rows = [sum(peer != LIMIT for peer in results.of(section, verb)) for verb in verbs]
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(verbs),
            1,
            figsize=(9, 1.2 + sum(1.2 + 0.32 * n for n in rows)),
            height_ratios=[n + 1.5 for n in rows],
            squeeze=False,
            layout="constrained",
        )
        for verb, axis in zip(verbs, axes[:, 0], strict=True):
            (_bounded if section.bounds else _bars)(axis, results, section, verb)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.07)
        figure.suptitle(section.heading, fontsize=12, fontweight="bold")
        figure.supxlabel(_caption(section), fontsize=8.5, color="#666666")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _caption(section: Section) -> str:
    whiskers = "One round."
    if section.rounds > 1:
        whiskers = f"Medians; whiskers: lowest to highest of {section.rounds} rounds."
    if section.bounds:
        return f"{whiskers} Dashed: the promise."
    return f"{whiskers} n ×: ckptio is n times as fast as this."


def _bars(axis: Any, results: Results, section: Section, verb: str) -> None:
    by_peer = results.of(section, verb)
    limit = by_peer.pop(LIMIT, None)
    times = {peer: seconds(figures) for peer, figures in by_peer.items()}
    every = [*times.values(), *([seconds(limit)] if limit else [])]
    scale = Scale.of(section.nbytes[verb], min(spread.median for spread in every))
    shown = {peer: scale.shown(spread) for peer, spread in times.items()}
    colours = [_colour(peer) for peer in shown]
    _draw_bars(axis, shown, colours)
    for row, peer in enumerate(shown):
        text = scale.text(shown[peer].median)
        if peer != OURS and OURS in by_peer:
            ratio = slower(by_peer[peer], by_peer[OURS]).median
            text += f"   {ratio:.{0 if ratio >= 10 else 1 if ratio >= 1 else 2}f} ×"
        _beside(axis, shown[peer].high, row, text, bold=peer == OURS)
    bounds = [value for spread in shown.values() for value in (spread.low, spread.high)]
    if limit:
        least = scale.shown(seconds(limit))
        bounds += [least.median]
        label = f"limit, {section.limits.get(verb, '')}: {scale.text(least.median)}"
        nearest = section.nearest.get(verb, OURS)
        if nearest in by_peer:
            share = slower(limit, by_peer[nearest]).median
            label += f"; {nearest} reaches {share:.{0 if share > 0.1 else 1}%}"
        axis.axvline(least.median, color=RED, linestyle="--", linewidth=1.4, zorder=3)
        axis.set_title(label, loc="right", fontsize=9, color=RED)
    axis.set_title(VERBS[verb], loc="left", fontsize=10.5)
    _stretch(axis, bounds, logarithmic=not scale.nbytes)
    axis.set_xlabel(scale.label + (", logarithmic" if not scale.nbytes else ""), fontsize=9)


def _colour(peer: str) -> str:
    if peer == DEVICE_PUT:
        return PALE
    return HIGHLIGHT if peer == OURS else KIN if peer.startswith(OURS) else GREY


def _bounded(axis: Any, results: Results, section: Section, verb: str) -> None:
    """Draw steps, each with the time that it may take."""
    shown = {peer: seconds(figures) for peer, figures in results.of(section, verb).items()}
    colours = [HIGHLIGHT if peer in section.bounds else GREY for peer in shown]
    _draw_bars(axis, shown, colours)
    scale = Scale("seconds")
    values = [value for spread in shown.values() for value in (spread.low, spread.high)]
    for row, (peer, spread) in enumerate(shown.items()):
        text = scale.text(spread.median)
        if bound := section.bounds.get(peer):
            axis.plot([bound] * 2, [row - 0.5, row + 0.5], color=RED, linestyle="--", linewidth=1.4)
            text += f"   {spread.median / bound:.0%} of {bound:g} s"
            values.append(bound)
        _beside(axis, spread.high, row, text, bold=peer in section.bounds)
    _stretch(axis, values, logarithmic=True)
    axis.set_xlabel("seconds (less is better), logarithmic", fontsize=9)


def _draw_bars(axis: Any, shown: dict[str, Spread], colours: list[str]) -> None:
    rows = range(len(shown))
    spreads = [*shown.values()]
    axis.barh(rows, [s.median for s in spreads], color=colours, height=0.68, zorder=2)
    axis.errorbar(
        [s.median for s in spreads],
        rows,
        xerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
        fmt="none",
        ecolor=INK,
        elinewidth=1,
        capsize=2.5,
        zorder=4,
    )
    axis.set_yticks(rows, shown)
    axis.invert_yaxis()  # the fastest on top
    axis.set_ylim(len(shown) - 0.5, -0.5)
    for label, name in zip(axis.get_yticklabels(), shown, strict=True):
        label.set_fontweight("bold" if name == OURS else "normal")


def _beside(axis: Any, x: float, row: int, text: str, *, bold: bool) -> None:
    axis.annotate(
        text,
        (x, row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        fontweight="bold" if bold else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        zorder=5,
    )


def _stretch(axis: Any, values: list[float], *, logarithmic: bool) -> None:
    """Leave room for what stands beside the bars."""
    least, most = min(values), max(values)
    if logarithmic:
        axis.set_xscale("log")
        left = least / 2
        axis.set_xlim(left, most * (most / left) ** 0.25)
        near = most / left < 100
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if near else (1.0,)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.xaxis.set_minor_formatter("")
    else:
        axis.set_xlim(0, most * 1.3)
    axis.grid(axis="x", color="#e6e6e6", linewidth=0.8, zorder=0)
    axis.set_axisbelow(True)
