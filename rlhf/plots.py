"""Pictures of a run from its JSON lines, also while it runs: reward, KL, loss, memory by phase, throughput."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rlhf.memory import NONE
from rlhf.metrics import read_jsonl

Row = dict[str, Any]

_INCHES = (9.0, 5.0)
_DOTS_PER_INCH = 100
_GIB = 2**30
_SMOOTH_FROM = 200  # points; from here on a curve is pale, with its moving average over it
_BLUE, _ORANGE = "#2f6fab", "#d9722c"
# Drawn one over the other, the outermost first: each quantity contains the next.
_QUANTITIES = {
    "device_bytes": ("device used", "#cfdcea", 0.84),
    "reserved_bytes": ("reserved by torch", "#7fa6cc", 0.56),
    "allocated_bytes": ("allocated by torch", "#1f4e80", 0.28),
}
_RESIDENT = {"allocated_bytes": ("resident memory of the process, since its start", "#7fa6cc", 0.6)}


def draw(folder: Path) -> list[Path]:
    """Write reward, kl, loss, memory and throughput .png to <folder>/plots; a picture without data is left out.

    Returns the files written. Titles come from <folder>/config.yaml where there is one.
    """
    metrics = [row for row in read_jsonl(folder / "metrics.jsonl") if "event" not in row]
    memory = [folder / "memory.jsonl", *folder.glob("ranks/memory_*.jsonl")]  # rank 0, and the others
    figures = {
        "reward": _reward(metrics),
        "kl": _kl(metrics),
        "loss": _loss(metrics),
        "memory": _memory([row for path in memory for row in read_jsonl(path)]),
        "throughput": _throughput(read_jsonl(folder / "timing.jsonl")),
    }
    run = _describe(folder)
    written = []
    for name, figure in figures.items():
        if figure is None:
            continue
        (folder / "plots").mkdir(exist_ok=True)
        written.append(folder / "plots" / f"{name}.png")
        title = f"{figure.get_suptitle()}, {run}" if run else figure.get_suptitle()
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=12)
        figure.savefig(written[-1], dpi=_DOTS_PER_INCH)
    return written


def _describe(folder: Path) -> str:
    path = folder / "config.yaml"
    if not path.exists():
        return ""
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    return ", ".join(f"{group} {config[group]['name']}" for group in ("framework", "stage", "model"))


def _reward(rows: list[Row]) -> Figure | None:
    """ppo: each rollout's mean and deviation, and held-out prompts; rm: both answers of a pair, and the accuracy."""
    if _has(rows, "reward/mean", "reward/heldout_mean"):
        figure, (axes,) = _panels("Reward", 1)
        _band(axes, rows, "reward/mean", "reward/std")
        _curve(axes, rows, "reward/mean", "rollout, mean", _BLUE)
        steps, mean = _series(rows, "reward/heldout_mean")
        deviation = dict(zip(*_series(rows, "reward/heldout_std"), strict=True))
        bars = [deviation.get(step, 0.0) for step in steps]
        if steps:
            label = "held-out prompts, mean ± 1 std"
            axes.errorbar(steps, mean, bars, fmt="o", color=_ORANGE, capsize=3, label=label)
        _finish(axes, "reward")
        return figure
    if _has(rows, "reward/chosen", "reward/rejected"):
        figure, (scores, accuracy) = _panels("Reward", 2)
        _curve(scores, rows, "reward/chosen", "chosen answers", _BLUE)
        _curve(scores, rows, "reward/rejected", "rejected answers", _ORANGE)
        _finish(scores, "reward (mean over the batch)")
        _curve(accuracy, rows, "accuracy", "training batch", _BLUE)
        _points(accuracy, rows, "heldout/accuracy", "held-out pairs", _ORANGE)
        _finish(accuracy, "accuracy (fraction of pairs)")
        accuracy.set_ylim(0, 1.02)
        return figure
    return None


def _kl(rows: list[Row]) -> Figure | None:
    if not _has(rows, "kl/signed", "kl/nonnegative"):
        return None
    _, coefficients = _series(rows, "kl/coefficient")
    adaptive = len(set(coefficients)) > 1
    figure, axes = _panels("KL to the reference", 2 if adaptive else 1)
    _curve(axes[0], rows, "kl/signed", "signed estimator", _BLUE)
    _curve(axes[0], rows, "kl/nonnegative", "non-negative estimator", _ORANGE)
    axes[0].axhline(0, color="black", linewidth=0.8)
    _finish(axes[0], "KL (nats)")
    if adaptive:
        _curve(axes[1], rows, "kl/coefficient", "", _BLUE)
        _finish(axes[1], "KL coefficient")
    return figure


def _loss(rows: list[Row]) -> Figure | None:
    """One panel per loss: those of actor and critic have nothing to do with each other's scale."""
    panels = [
        ("loss", "loss (nats)", "heldout/loss"),
        ("loss/actor", "actor loss", None),
        ("loss/critic", "critic loss", None),
        ("loss/ptx", "pretraining loss (nats)", None),
    ]
    shown = [panel for panel in panels if _has(rows, *filter(None, (panel[0], panel[2])))]
    if not shown:
        return None
    figure, all_axes = _panels("Loss", len(shown))
    for axes, (name, label, heldout) in zip(all_axes, shown, strict=True):
        _curve(axes, rows, name, "training batch" if heldout else "", _BLUE)
        if heldout:
            _points(axes, rows, heldout, "held-out", _ORANGE)
        _finish(axes, label)
    return figure


def _memory(rows: list[Row]) -> Figure | None:
    """The highest peak of each phase and role, over all steps and ranks, as nested bars from zero."""
    peaks: dict[str, dict[str, int]] = {}
    for row in rows:
        phase = "between phases" if row["phase"] == NONE else row["phase"]
        place = peaks.setdefault(phase if row["role"] == NONE else f"{phase} · {row['role']}", {})
        for quantity in _QUANTITIES:
            place[quantity] = max(place.get(quantity, 0), row[quantity])
    if not peaks:
        return None
    figure, (axes,) = _panels("Peak memory by phase and role", 1)
    places = range(len(peaks))
    on_cpu = all(len(set(peak.values())) == 1 for peak in peaks.values())  # the three are one there: resident memory
    for quantity, (label, colour, height) in (_RESIDENT if on_cpu else _QUANTITIES).items():
        widths = [peak[quantity] / _GIB for peak in peaks.values()]
        axes.barh(places, widths, height=height, color=colour, label=label)
    for place, peak in zip(places, peaks.values(), strict=True):
        axes.annotate(
            f"{max(peak.values()) / _GIB:.2f}", (max(peak.values()) / _GIB, place), (4, 0),
            textcoords="offset points", verticalalignment="center", fontsize=9,
        )  # fmt: skip
    axes.set_yticks(places, list(peaks))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.margins(x=0.08)
    axes.set_xlabel("GiB (highest over steps and ranks)")
    axes.grid(axis="x", color="#e3e6ea")
    _legend(axes)
    return figure


def _throughput(rows: list[Row]) -> Figure | None:
    panels = {
        "tokens_per_second": "tokens per second",
        "samples_per_second": "samples per second",
        "seconds": "seconds per step",
    }
    shown = [name for name in panels if _has(rows, name)]
    if not shown:
        return None
    figure, all_axes = _panels("Throughput", len(shown))
    for axes, name in zip(all_axes, shown, strict=True):
        _curve(axes, rows, name, "", _BLUE)
        axes.set_ylim(0, 1.1 * max(axes.get_ylim()[1], 1e-9))
        _finish(axes, panels[name])
    return figure


def _panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=_INCHES, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.12))
    figure.suptitle(title)
    all_axes = list(figure.subplots(1, count, squeeze=False)[0])
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, all_axes


def _curve(axes: Axes, rows: list[Row], name: str, label: str, colour: str) -> None:
    steps, values = _series(rows, name)
    if not steps:
        return
    if len(steps) >= _SMOOTH_FROM:
        window = len(steps) // 50
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axes.set_xlabel(f"step (bold: average of {window})")
        values = [_mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
    axes.plot(steps, values, "o-" if len(steps) == 1 else "-", color=colour, linewidth=1.8, label=label)


def _mean(values: list[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _points(axes: Axes, rows: list[Row], name: str, label: str, colour: str) -> None:
    steps, values = _series(rows, name)
    if steps:
        axes.plot(steps, values, "o-", color=colour, markersize=5, linewidth=1, label=label)


def _band(axes: Axes, rows: list[Row], mean: str, deviation: str) -> None:
    both = [row for row in rows if mean in row and deviation in row]
    steps, middle = _series(both, mean)
    _, width = _series(both, deviation)
    if steps:
        low = [m - w for m, w in zip(middle, width, strict=True)]
        high = [m + w for m, w in zip(middle, width, strict=True)]
        axes.fill_between(steps, low, high, color=_BLUE, alpha=0.15, linewidth=0, label="rollout, mean ± 1 std")


def _finish(axes: Axes, y_label: str) -> None:
    axes.set_xlabel(axes.get_xlabel() or "step")
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=4, min_n_ticks=1))
    axes.grid(color="#e3e6ea")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Above the axes, where it covers no data."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9, ncols=3, borderaxespad=0.2)


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric; a value that is not finite leaves a gap."""
    pairs = [(row["step"], float(row[name])) for row in rows if name in row]
    return [step for step, _ in pairs], [value if math.isfinite(value) else math.nan for _, value in pairs]


def _has(rows: list[Row], *names: str) -> bool:
    return any(name in row for row in rows for name in names)
