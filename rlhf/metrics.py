"""The record of a run: JSON lines as it goes, result.json at its end. Weights & Biases gets a copy, never the only one.

Files of a run folder written here (memory.jsonl is the memory monitor's):

- metrics.jsonl: one object per line, `step` and slash names such as `reward/mean`. Only what a second run with the same
  config repeats exactly; a row with `event` is not a measurement (early stop, rows dropped).
- timing.jsonl: what depends on the clock or on the machine: `seconds`, `tokens_per_second`, warnings about memory.
- samples.jsonl: one row per sample: `step`, and what the stage shows (prompt, answer, reward, ...).
- result.json: see `Recorder.finish`.

Numbers that JSON does not have are written as the strings "nan", "inf" and "-inf", which `float()` reads back.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, SupportsFloat, TextIO

from rlhf.config import Config
from rlhf.files import plain, write_json, write_text
from rlhf.outcome import STATUSES
from rlhf.tracking import Tracker

_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "accelerate", "datasets", "colossalai", "trlx")
_GIB = 2**30
_STREAMS = ("metrics.jsonl", "timing.jsonl", "samples.jsonl")


class Recorder:
    """The record of one stage of one run; on ranks other than 0 every method does nothing.

    Every line is flushed as it is written, so that a killed process loses at most the line it was writing.
    """

    def __init__(self, folder: Path, stage: str, config: Config, rank: int, framework: str):
        self._folder = folder
        self._stage = stage
        self._config = config
        self._framework = framework
        self._silent = rank != 0
        self._streams: dict[str, TextIO] = {}
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()
        self._last_step = -1
        self._tracker = Tracker(folder, stage, config, enabled=not self._silent)
        if self._silent:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._keep_rows(math.inf)

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Append a row of deterministic values to metrics.jsonl; several rows may share a step.

        Raises ValueError when `step` is lower than that of an earlier row.
        """
        if self._silent:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        self._advance(step)
        self._write("metrics.jsonl", step, numbers)
        self._tracker.log(step, numbers)

    def time(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Append a row of values that depend on the clock to timing.jsonl."""
        if self._silent:
            return
        numbers = {name: _number(value) for name, value in values.items()}
        self._write("timing.jsonl", step, numbers)
        self._tracker.log(step, {f"time/{name}": value for name, value in numbers.items()})

    def event(self, step: int, kind: str, repeatable: bool = True, **fields: Any) -> None:
        """Append something that happened, not a measurement, to metrics.jsonl, or to timing.jsonl if not repeatable.

        Raises ValueError as `log` does.
        """
        if self._silent:
            return
        if repeatable:
            self._advance(step)
        self._write("metrics.jsonl" if repeatable else "timing.jsonl", step, {"event": kind, **fields})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append the rows to samples.jsonl and send them as one table."""
        if self._silent:
            return
        for row in rows:
            self._write("samples.jsonl", step, row)
        self._tracker.table(step, "samples", rows)

    def memory(self, step: int, peaks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
        """Send what `Monitor.peaks()` returned, as memory/<phase>/<role>/<quantity>_gib; the file is memory.jsonl."""
        places = {f"{phase}/{role}": sizes for phase, roles in peaks.items() for role, sizes in roles.items()}
        gib = {
            f"memory/{place}/{quantity.removesuffix('_bytes')}_gib": size / _GIB
            for place, sizes in places.items()
            for quantity, size in sizes.items()
            if quantity.endswith("_bytes")
        }
        self._tracker.log(step, gib)

    def rewind(self, step: int) -> None:
        """Forget what came after `step`, that of the checkpoint to resume from; -1 forgets everything."""
        if not self._silent:
            self._keep_rows(step)

    def finish(self, result: dict[str, Any]) -> None:
        """Write result.json, draw the plots, end the tracking.

        The caller gives `status`, `steps`, `metrics`, `memory` and `error`; a key that it gives wins over one from
        here. Raises ValueError for a status that is not one of `outcome.STATUSES`. The file holds:

        - status: ok | oom | failed | interrupted
        - stage, framework, seed, config_hash (what decides the numbers: the config without wandb and resume)
        - versions: {python, torch, cuda, transformers, deepspeed, peft, ...}, those that are installed
        - device: {name, type: cuda | cpu, count: on this node, memory_bytes: of one GPU, or of the host}
        - git_commit: of this repository; null when the code does not run from a checkout
        - started: ISO 8601 in UTC; wall_seconds: of this process, so of the part after the last resume
        - steps: optimizer steps (sft, rm) or rollouts (ppo) done
        - metrics: final and held-out values: heldout_loss, heldout_perplexity, rm_accuracy, rm_margin,
          heldout_reward_before, heldout_reward_before_std, heldout_reward_after, ...
        - memory: {predicted: null or the plan, measured: {peak_bytes, peak_phase, peak_role, phases}}
        - error: null or {rank, phase, role, type, message}
        """
        if self._silent:
            return
        if result["status"] not in STATUSES:
            raise ValueError(f"The status of a result is one of {', '.join(STATUSES)}, not {result['status']!r}.")
        known = {
            "stage": self._stage,
            "framework": self._framework,
            **environment(self._config.hardware.device),
            "started": self._started.isoformat(timespec="seconds"),
            "wall_seconds": round(time.monotonic() - self._clock, 3),
            "seed": self._config.seed,
            "config_hash": config_hash(self._config),
        }
        write_json(self._folder / "result.json", known | result)
        self._close_streams()
        self._tracker.images(self._draw())
        self._tracker.close(summary=result.get("metrics") or {}, failed=result["status"] != "ok")

    def _draw(self) -> list[Path]:
        """The plots; a picture that cannot be drawn costs a message, since the numbers are already on disk."""
        from rlhf.plots import draw  # matplotlib takes a second to import, and is needed only here

        try:
            return draw(self._folder)
        except Exception as error:
            print(f"The plots could not be drawn: {type(error).__name__}: {error}", file=sys.stderr)
            return []

    def _advance(self, step: int) -> None:
        if step < self._last_step:
            raise ValueError(
                f"metrics.jsonl already holds step {self._last_step}, so step {step} cannot be added to it. "
                "A run that goes back must call rewind first; a new run needs a folder of its own."
            )
        self._last_step = step

    def _write(self, name: str, step: int, row: Mapping[str, Any]) -> None:
        assert "step" not in row, "the step of a row is given apart"
        if name not in self._streams:
            self._streams[name] = (self._folder / name).open("a", encoding="utf-8")
        self._streams[name].write(_dumps({"step": step, **row}) + "\n")
        self._streams[name].flush()

    def _keep_rows(self, last: float) -> None:
        """Drop rows after step `last` and a torn last line: the next row must not be glued to it."""
        self._close_streams()
        for name in _STREAMS:
            path = self._folder / name
            kept = "".join(f"{line}\n" for line, row in _lines(path) if row["step"] <= last)
            if kept != _text(path):
                write_text(path, kept)
        self._last_step = max((row["step"] for row in read_jsonl(self._folder / "metrics.jsonl")), default=-1)

    def _close_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may still be growing: no file is no rows, and a torn last line is skipped.

    Raises ValueError, with the line number, for any other line that is not JSON.
    """
    return [row for _, row in _lines(path)]


def config_hash(config: Config) -> str:
    """16 hex digits; equal for configs that differ only in wandb and resume, which change no number."""
    text = json.dumps(config.model_dump(mode="json", exclude={"wandb", "resume"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment(device_type: str | None = None) -> dict[str, Any]:
    """`versions`, `device` and `git_commit` of this process, as result.json holds them. Imports torch.

    `device_type` cpu or cuda; None: cuda where there is a GPU.
    """
    import torch

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {"versions": versions, "device": _device(device_type), "git_commit": _git_commit()}


def _device(device_type: str | None) -> dict[str, Any]:
    import psutil
    import torch

    if device_type != "cpu" and torch.cuda.is_available():
        card, count = torch.cuda.get_device_properties(torch.cuda.current_device()), torch.cuda.device_count()
        return {"name": card.name, "type": "cuda", "count": count, "memory_bytes": card.total_memory}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": _cpu_name(), "type": "cpu", "count": cores, "memory_bytes": psutil.virtual_memory().total}


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    # An environment inside somebody's own repository would otherwise report that repository's commit as ours.
    return answer[1] if Path(answer[0]) == root else None


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # no newline after it: the process was killed while writing it
                return
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        yield line, row


def _text(path: Path) -> str:
    # A torn last line may end inside a character.
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _number(value: Any) -> int | float:
    """A Python number for anything that is one, 0-dimensional tensors included."""
    return value if isinstance(value, int) else float(value)


def _dumps(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False, ensure_ascii=False)
