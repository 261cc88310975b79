"""Shows what a run did: python scripts/summary.py <run folder>. Numbers before and after, three answers, where the
plots are."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rlhf.files import read_json
from rlhf.memory import format_gib
from rlhf.metrics import read_jsonl

ANSWERS_SHOWN = 3


def stage_folders(run: Path) -> list[Path]:
    """The folders of the run that hold a stage of their own."""
    return [folder for folder in (run / "sft", run / "rm", run / "ppo", run) if (folder / "metrics.jsonl").is_file()]


def first_and_last(folder: Path, name: str) -> tuple[float, float] | None:
    values = [row[name] for row in read_jsonl(folder / "metrics.jsonl") if name in row]
    return (float(values[0]), float(values[-1])) if values else None


def numbers(folders: list[Path]) -> Table:
    table = Table(title="Held-out numbers", title_justify="left")
    table.add_column("stage")
    table.add_column("what")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    shown = {
        "heldout/loss": "loss",
        "heldout/perplexity": "perplexity",
        "heldout/accuracy": "accuracy",
        "reward/heldout_mean": "reward",
        "reward/heldout_std": "reward, deviation",
    }
    for folder in folders:
        stage = (read_json(folder / "config.yaml") or {}).get("stage", {}).get("name") or folder.name
        for name, label in shown.items():
            values = first_and_last(folder, name)
            if values:
                table.add_row(stage, label, f"{values[0]:.3f}", f"{values[1]:.3f}")
    return table


def peaks(folders: list[Path]) -> Table:
    table = Table(title="Peak memory by phase", title_justify="left")
    for column in ("stage", "phase", "role"):
        table.add_column(column)
    table.add_column("device used", justify="right")
    for folder in folders:
        result = read_json(folder / "result.json") or {}
        phases = ((result.get("memory") or {}).get("measured") or {}).get("phases") or {}
        for phase, roles in phases.items():
            role, values = max(roles.items(), key=lambda item: item[1]["device_bytes"])
            if phase != "-":
                table.add_row(folder.name, phase, role, format_gib(values["device_bytes"]))
    return table


def answers(folder: Path, console: Console) -> None:
    """The same held-out prompts before and after training."""
    rows = [row for row in read_jsonl(folder / "samples.jsonl") if row.get("split") == "heldout"]
    if not rows:
        return
    first, last = min(row["step"] for row in rows), max(row["step"] for row in rows)
    after = {row["prompt"]: row for row in rows if row["step"] == last}
    for row in [row for row in rows if row["step"] == first and row["prompt"] in after][:ANSWERS_SHOWN]:
        console.print(f"\n[bold]{row['prompt']}[/bold]", highlight=False)
        for label, shown in (("before", row), ("after", after[row["prompt"]])):
            console.print(
                f"  {label:<6} ({float(shown['reward']):+.2f})  {shown['answer']}", highlight=False, markup=False
            )


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python scripts/summary.py <run folder>", file=sys.stderr)
        return 2
    run, console = Path(sys.argv[1]), Console()
    folders = stage_folders(run)
    if not folders:
        print(f"{run} holds no run: there is no metrics.jsonl in it", file=sys.stderr)
        return 2
    console.print(numbers(folders))
    console.print(peaks(folders))
    for folder in folders:
        if (folder / "samples.jsonl").is_file():
            answers(folder, console)
    console.print("\nPlots: " + ", ".join(str(folder / "plots") for folder in folders), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
