"""How a run can end: the `status` of result.json, and the exit codes of train.py and of every rank. No torch here."""

from __future__ import annotations

import signal

# From best to worst: a run of several stages has the worst status of its stages.
STATUSES = ("ok", "interrupted", "failed", "oom")

OK, FAILED, REFUSED, OUT_OF_MEMORY = 0, 1, 2, 3  # REFUSED: a ConfigError


def interrupted_by(signum: int) -> int:
    """The exit code after a signal asked for the end, as shells count it."""
    return 128 + signum


INTERRUPTED = (interrupted_by(signal.SIGINT), interrupted_by(signal.SIGTERM))  # 130 and 143
