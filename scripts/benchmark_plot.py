"""Draws the lines of benchmark.py as one picture: roofline, occupancy of the ragged job, seconds per step.

    python scripts/benchmark.py --tasks '["decode", "ragged", "context"]' --precision '["bfloat16"]' --plot speed.png

makes it; a task that was not measured leaves its panel empty.
"""

import itertools
from pathlib import Path
from typing import Any

from lit_gen.limits import Limits
from lit_gen.utils import UserError

NAMES = {"lit_gen": "lit_gen", "hf": "transformers", "openvino": "OpenVINO", "llamacpp": "llama.cpp"}
NAMES |= {"litgpt": "litgpt"}
COLORS = dict(zip(NAMES, ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#8c564b"), strict=True))
MARKERS = dict(zip(NAMES, "os^Dv", strict=True))
Axes = Any  # matplotlib's, which is optional
Line = dict[str, Any]


def draw(lines: list[Line], limits: Limits, dtype: str, file: Path) -> None:
    """Draws what there are lines for.

    Raises:
        UserError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install -e '.[plot]'") from None
    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    roofline(left, [line for line in lines if line.get("task") == "decode"], limits, dtype)
    occupancy(middle, [line for line in lines if "timeline" in line])
    step_time(right, [line for line in lines if line.get("task") == "context"])
    for axes in (left, middle, right):
        axes.grid(True, which="major", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)


def roofline(axes: Axes, lines: list[Line], limits: Limits, dtype: str) -> None:
    """Operations per second of decode steps against operations per byte, under what the machine can do."""
    threads = "1 thread" if limits.threads == 1 else f"{limits.threads} threads"
    axes.set(title=f"Decode step of B rows, {dtype}, {threads}", xscale="log", yscale="log")
    axes.set(xlabel="work of a step per byte it reads (FLOP/byte)", ylabel="speed (GFLOP/s)")
    if not lines:
        return
    intensity = [line["flops_per_step"] / line["bytes_per_step"] for line in lines]
    peak = limits.peak(dtype)
    bandwidth = limits.bandwidth(lines[0]["bytes_per_step"])
    low, high = min(intensity) / 2, max(max(intensity) * 2, 2 * peak / bandwidth)
    ridge = peak / bandwidth
    axes.plot([low, ridge, high], [low * bandwidth / 1e9, peak / 1e9, peak / 1e9], "k-", lw=1.5)
    middle = (low * ridge) ** 0.5
    axes.text(middle, middle * bandwidth / 1e9 * 1.15, f"{bandwidth / 1e9:.0f} GB/s", fontsize=8, ha="right")
    axes.text(high, peak / 1e9 * 1.06, f"{peak / 1e9:.0f} GFLOP/s", fontsize=8, ha="right")
    for x, line in zip(intensity, lines, strict=True):
        slowest = min(line["tokens_per_second"].values()) / line["batch"] * line["flops_per_step"] / 1e9
        where = {"textcoords": "offset points", "xytext": (0, -16), "fontsize": 8, "ha": "center"}
        axes.annotate(f"B={line['batch']}", (x, slowest), **where)
    axes.margins(y=0.12)
    for name, label in NAMES.items():
        found = [(x, line) for x, line in zip(intensity, lines, strict=True) if name in line["tokens_per_second"]]
        if not found:
            continue
        speeds = [line["tokens_per_second"][name] / line["batch"] * line["flops_per_step"] / 1e9 for _, line in found]
        axes.plot([x for x, _ in found], speeds, MARKERS[name] + "-", color=COLORS[name], lw=0.8, ms=6, label=label)
    _plain_ticks(axes.xaxis, axes.yaxis)


def occupancy(axes: Axes, lines: list[Line]) -> None:
    """Rows that somebody still waits for, over the time of the job."""
    axes.set(title="A job of prompts of many lengths", xlabel="time (s)", ylabel="rows that run and are wanted")
    styles = itertools.cycle(["-", "--", ":"])
    for line, style in zip(lines, styles, strict=False):
        seconds, rows = zip(*line["timeline"], strict=True)
        label = f"{line['engine']}: {line['useful_tokens_per_second']:.0f} tokens/s"
        color = COLORS["lit_gen"] if "continuous" in line["engine"] else "0.45"
        axes.step([0, *seconds], [rows[0], *rows], style, where="pre", color=color, lw=1.2, label=label)
    axes.set_ylim(bottom=0)
    axes.yaxis.get_major_locator().set_params(integer=True)


def step_time(axes: Axes, lines: list[Line]) -> None:
    """Milliseconds per step against context, a line for each number of rows; dashed what was fitted."""
    axes.set(title="Time per step", xlabel="context (tokens)", ylabel="time per step (ms)", xscale="log", yscale="log")
    fit = next((line["fit"] for line in lines if "fit" in line), None)
    measured = [line for line in lines if "ms_per_step" in line]
    for i, batch in enumerate(sorted({line["batch"] for line in measured})):
        points = sorted((line["context"], line["ms_per_step"]) for line in measured if line["batch"] == batch)
        context, ms = zip(*points, strict=True)
        axes.plot(context, ms, "o-", color=f"C{i}", ms=4, lw=1.2, label=f"{batch} rows" if batch > 1 else "1 row")
        if fit:
            row, column = fit["seconds_per_row"], fit["seconds_per_row_and_column"]
            fitted = [1e3 * (fit["seconds"] + batch * (row + column * S)) for S in context]
            axes.plot(context, fitted, "--", color=f"C{i}", lw=0.8)
    if measured:
        contexts = sorted({line["context"] for line in measured})
        axes.set_xticks(contexts, [str(S) for S in contexts])
        axes.xaxis.minorticks_off()
        axes.plot([], [], "k--", lw=0.8, label="fitted: a + b rows + c rows x context")
        _plain_ticks(axes.yaxis)


def _plain_ticks(*logarithmic: Axes) -> None:
    """1, 2, 5, 10, ... instead of powers of ten, of which a picture may hold none."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis in logarithmic:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())
