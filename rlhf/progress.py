"""What the user sees while a stage runs: a live line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

_PLAIN_SECONDS = 10.0  # between two lines where there is no terminal
_RATE_STEPS = 20  # the rate is that of so many last steps
_GIB = 2**30


class Progress:
    """Progress of one stage: step, rate, time left, memory now and at its peak, and the headline numbers.

    Only rank 0 shows anything. A resumed stage may start at any step: the rate counts the steps seen.
    """

    def __init__(self, stage: str, total_steps: int, rank: int, console: Console | None = None):
        self._stage = stage
        self._total = total_steps
        self._console = Console(quiet=True) if rank != 0 else console or Console()
        self._times: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS + 1)
        self._peak_bytes = 0
        self._line = ""
        self._shown_line = ""
        self._shown_at = time.monotonic()
        self._live: RichProgress | None = None
        self._task = TaskID(0)
        if self._console.is_terminal and not self._console.quiet:
            self._live = RichProgress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=12, table_column=Column(min_width=12)),
                # Wraps on a narrow terminal, where rich would cut off the numbers.
                TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=False)),
                console=self._console,
            )
            self._task = self._live.add_task(stage, total=total_steps, line=f"0/{total_steps}")
            self._live.start()

    def advance(self, step: int, headline: Mapping[str, float], memory_bytes: int) -> None:
        """Step `step` (from 1) is done. `memory_bytes` is allocated now; the peak is the highest so far."""
        now = time.monotonic()
        self._times.append((step, now))
        self._peak_bytes = max(self._peak_bytes, memory_bytes)
        self._line = self._describe(step, headline, memory_bytes)
        if self._live:
            self._live.update(self._task, completed=step, line=self._line)
        elif now - self._shown_at >= _PLAIN_SECONDS:
            self._print_line()

    def note(self, text: str) -> None:
        """Print a line of its own, above the live one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        elif self._line != self._shown_line:
            self._print_line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _print_line(self) -> None:
        self.note(f"{self._stage} {self._line}")
        self._shown_line, self._shown_at = self._line, time.monotonic()

    def _describe(self, step: int, headline: Mapping[str, float], memory_bytes: int) -> str:
        parts = [f"{step}/{self._total}", *self._pace(step)]
        parts.append(f"{memory_bytes / _GIB:.2f} GiB (peak {self._peak_bytes / _GIB:.2f})")
        parts += [f"{name} {value:.4g}" for name, value in headline.items()]
        return "  ".join(parts)

    def _pace(self, step: int) -> list[str]:
        """Rate and time left, as soon as two steps have been seen."""
        (first_step, first_time), (last_step, last_time) = self._times[0], self._times[-1]
        if last_step == first_step or last_time == first_time:
            return []
        seconds = (last_time - first_time) / (last_step - first_step)
        rate = f"{1 / seconds:.2f} steps/s" if seconds < 1 else f"{seconds:.1f} s/step"
        return [rate, f"{timedelta(seconds=round(seconds * (self._total - step)))} left"]
