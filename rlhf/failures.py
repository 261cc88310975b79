"""What ranks leave behind in <run>/ranks: rank_<k>.json (where rank k is) and error_<k>.json (why it ended).

Files, because the process that reports an error is not the one that had it, may be on another machine, and the rank
may be gone without a word. No torch here: the parent reads them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from rlhf.files import read_json, write_json

# A rank that was killed leaves no error itself, while its peers' broken connections raise within milliseconds.
# So a death noticed up to this much after an exception is taken for its cause.
DEATH_PRECEDES_SECONDS = 2.0
TRACEBACK_LINES = 12


def clear(folder: Path) -> None:
    """Forget how the ranks of an earlier attempt ended; their logs and memory rows stay."""
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    for pattern in ("rank_*.json", "error_*.json"):
        for path in (folder / "ranks").glob(pattern):
            path.unlink(missing_ok=True)


def write_heartbeat(folder: Path, rank: int, phase: str) -> None:
    """The first and the last heartbeat of a rank; those between come from its memory monitor."""
    beat = {"pid": os.getpid(), "host": socket.gethostname(), "rank": rank, "step": 0}
    write_json(folder / "ranks" / f"rank_{rank}.json", beat | {"phase": phase, "role": None, "time": time.time()})


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Keep an exception of this rank, also one that was never raised. The first stays: others follow from it."""
    path = folder / "ranks" / f"error_{rank}.json"
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = _where(folder, rank) | {
        "rank": rank,
        "time": time.time(),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)) if error.__traceback__ else "",
    }
    problems = getattr(error, "problems", None)  # ConfigError's, also when another copy of the class raised it
    if problems is not None:
        content["problems"] = list(problems)
    write_json(path, content)


def write_death(folder: Path, rank: int, exitcode: int | None, when: float) -> None:
    """Keep that a rank ended without an exception of its own; `exitcode` is negative for a signal."""
    path = folder / "ranks" / f"error_{rank}.json"
    if path.exists():
        return
    if exitcode is not None and exitcode < 0:
        kind, message = signal.Signals(-exitcode).name, "the process was killed by this signal"
        if exitcode == -signal.SIGKILL:
            message += "; on Linux that is often the kernel, when the machine is out of memory (see dmesg)"
    else:
        kind, message = f"exit code {exitcode}", "the process ended without an exception"
    content = {"rank": rank, "time": when, "type": kind, "message": message, "traceback": "", "exitcode": exitcode}
    write_json(path, _where(folder, rank) | content)


def _where(folder: Path, rank: int) -> dict[str, Any]:
    beat = read_json(folder / "ranks" / f"rank_{rank}.json") or {}
    return {key: beat.get(key) for key in ("host", "step", "phase", "role")}


def heartbeats(folder: Path) -> dict[int, dict[str, Any]]:
    """By rank: {pid, host, rank, step, phase, role, time}, as last written."""
    found = (read_json(path) for path in (folder / "ranks").glob("rank_*.json"))
    return {beat["rank"]: beat for beat in sorted((b for b in found if b), key=lambda b: b["rank"])}


def errors(folder: Path) -> list[dict[str, Any]]:
    """What ended the ranks, the cause first."""
    found = [error for path in (folder / "ranks").glob("error_*.json") if (error := read_json(path))]

    def happened(error: dict[str, Any]) -> float:
        return error["time"] - (DEATH_PRECEDES_SECONDS if not error["traceback"] else 0.0)

    return sorted(found, key=happened)


def describe(error: dict[str, Any]) -> str:
    """Rank, phase and role, type, message, then the last lines of the traceback."""
    place = f" at step {error['step']}" if error.get("step") is not None else ""
    if error.get("phase"):
        place += f" in phase {error['phase']}" + (f" of the {error['role']}" if error.get("role") else "")
    lines = [f"Rank {error['rank']} failed first{place}: {error['type']}: {error['message']}"]
    return "\n".join(lines + error["traceback"].rstrip().splitlines()[-TRACEBACK_LINES:])
