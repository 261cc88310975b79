"""The table at the end of a sweep. Cells may have run in other processes, so it is read from their folders.

`python -m rlhf.sweep <folder>` prints it again, or for a sweep that was stopped.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rlhf.config import ConfigError
from rlhf.files import read_json

REFUSED = "refused.json"  # {"problems": [...]}: the cell's configuration cannot run, so it has no result.json
HEADLINES = ("loss", "heldout_loss", "rm_accuracy", "heldout_reward_before", "heldout_reward_after")


def write_refusal(folder: Path, error: ConfigError) -> None:
    (folder / REFUSED).write_text(json.dumps({"problems": error.problems}, indent=2))


@dataclass(frozen=True)
class Cell:
    """One combination. `status`: as in result.json, or refused, or failed when it ended without a result."""

    folder: str
    overrides: list[str]
    status: str
    peak_bytes: int | None
    wall_seconds: float | None
    metrics: dict[str, Any]
    error: str | None


def read_cell(folder: Path) -> Cell:
    overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text()) or []
    result, refusal = read_json(folder / "result.json"), read_json(folder / REFUSED)
    if result is None:
        problems = refusal["problems"] if refusal else [f"ended without a result; see {folder / 'ranks'}"]
        return Cell(str(folder), overrides, "refused" if refusal else "failed", None, None, {}, " ".join(problems))
    measured = (result.get("memory") or {}).get("measured") or {}
    return Cell(
        folder=str(folder),
        overrides=overrides,
        status=result["status"],
        peak_bytes=measured.get("peak_bytes"),
        wall_seconds=result.get("wall_seconds"),
        metrics=result.get("metrics") or {},
        error=(result.get("error") or {}).get("message"),
    )


def read_cells(folder: Path) -> list[Cell]:
    """Of a sweep's folder, in the order they were started."""
    folders = [path.parent.parent for path in folder.glob("*/.hydra/overrides.yaml")]
    numbered = sorted(folders, key=lambda cell: (not cell.name.isdecimal(), cell.name.rjust(12, "0")))
    return [read_cell(cell) for cell in numbered]


def rows(cells: list[Cell]) -> tuple[list[str], list[list[str]]]:
    """Column heads and text. Overrides that all cells share are left out, and metrics that none has."""
    shared = set.intersection(*(set(cell.overrides) for cell in cells)) if len(cells) > 1 else set()
    metrics = [name for name in HEADLINES if any(name in cell.metrics for cell in cells)]
    heads = ["cell", "overrides", "status", "peak (GiB)", "seconds", *metrics, "error"]
    lines = []
    for cell in cells:
        varied = " ".join(override for override in cell.overrides if override not in shared)
        peak = "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**30:.2f}"
        seconds = "" if cell.wall_seconds is None else f"{cell.wall_seconds:.0f}"
        values = [_number(cell.metrics.get(name)) for name in metrics]
        lines.append([Path(cell.folder).name, varied, cell.status, peak, seconds, *values, cell.error or ""])
    return heads, lines


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""


class SweepTable(Callback):
    """At the end of a sweep: prints the table, writes sweep.json and sweep.md, exits with 1 unless every cell is ok."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        # Asked for now, the sweep's folder has one and the same time in its name for the sweeper and for us.
        self.folder = Path(config.hydra.sweep.dir).absolute()

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        if not report(self.folder):
            sys.exit(1)


def report(folder: Path) -> bool:
    """Print the table of a sweep's folder, write sweep.json and sweep.md there; returns whether every cell is ok."""
    cells = read_cells(folder)
    heads, lines = rows(cells)
    (folder / "sweep.json").write_text(json.dumps({"cells": [asdict(cell) for cell in cells]}, indent=2))
    (folder / "sweep.md").write_text(markdown(heads, lines))
    _print(str(folder), heads, lines)
    return all(cell.status == "ok" for cell in cells)


def _print(title: str, heads: list[str], lines: list[list[str]]) -> None:
    from rich.console import Console  # train.py imports this module, and has to start fast
    from rich.table import Table
    from rich.text import Text

    table = Table(*heads, title=title)
    for line in lines:
        table.add_row(*(Text(text) for text in line))  # overrides have brackets, which rich would take for markup
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe
    console.print(table)


def markdown(heads: list[str], lines: list[list[str]]) -> str:
    table = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(_in_cell(text) for text in line)} |\n" for line in table)


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    sys.exit(0 if report(Path(sys.argv[1])) else 1)
