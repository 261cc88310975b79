"""Memory by phase and role while a rank runs: memory.jsonl, the peaks of result.json, heartbeats and warnings."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf.config import MonitorConfig
from rlhf.files import write_text
from rlhf.memory import NONE, PHASES, ROLES, Breakdown, Term, Usage
from rlhf.memory.growth import MIB, GrowthWatch
from rlhf.memory.meters import Reading, meter_for

HEARTBEAT_SECONDS = 0.2


@dataclass
class Span:
    """What was seen while one phase was the innermost: a visit, or several of the same phase and role together."""

    phase: str
    role: str
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    seconds: float = 0.0
    empty_cache_seconds: float = 0.0
    count: int = 0
    outside_bytes: int | None = None  # least seen outside torch; None: nothing seen yet

    def see(self, reading: Reading) -> None:
        """The device's own peak falls between samples, but it cannot be less than torch's exact peak of reserved
        memory and the least that was ever seen outside torch, together."""
        outside = reading.now.outside_torch_bytes
        self.outside_bytes = outside if self.outside_bytes is None else min(outside, self.outside_bytes)
        self.usage = Usage(*map(max, self.usage, reading.peak))
        at_least = self.usage.reserved_bytes + self.outside_bytes
        self.usage = self.usage._replace(device_bytes=max(self.usage.device_bytes, at_least))

    def add(self, other: Span) -> None:
        self.usage = Usage(*map(max, self.usage, other.usage))
        self.seconds += other.seconds
        self.empty_cache_seconds += other.empty_cache_seconds
        self.count += other.count

    def numbers(self) -> dict[str, Any]:
        return {
            **self.usage._asdict(),
            "outside_torch_bytes": self.usage.outside_torch_bytes,
            "fragmentation_bytes": self.usage.fragmentation_bytes,
            "seconds": self.seconds,
            "count": self.count,
            "empty_cache_seconds": self.empty_cache_seconds,
        }


Spans = dict[tuple[str, str], Span]


def add_span(spans: Spans, span: Span) -> None:
    spans.setdefault((span.phase, span.role), Span(span.phase, span.role)).add(span)


class Monitor:
    """Close it whatever happens. On CUDA, construct it or call `meters.note_start` before CUDA starts.

    What happens while no phase is open is kept under the phase "-". Seconds, like peaks, belong to the innermost
    phase alone, so they add up. Not for use by several threads.
    """

    def __init__(self, folder: Path, config: MonitorConfig, device: torch.device, rank: int, world_size: int):
        assert 0 <= rank < world_size
        self._config = config
        self._rank = rank
        ranks = folder / "ranks"
        ranks.mkdir(parents=True, exist_ok=True)
        self._rows_path = folder / "memory.jsonl" if rank == 0 else ranks / f"memory_{rank}.jsonl"
        self._heartbeat_path = ranks / f"rank_{rank}.json"
        self._beat_phase: str | None = None
        self._heartbeat_due = 0.0
        self._meter = meter_for(device)
        self._growth = GrowthWatch(config.growth_warning_mib * MIB, device)
        self._step = 0
        self._open = [Span(NONE, NONE)]
        self._failed: tuple[int, Span] | None = None  # id of the exception: to hold it would hold its tensors
        self._last_outermost = NONE
        self._in_step: Spans = {}
        self._in_run: Spans = {}
        self._lock = threading.Lock()  # the sampler must not charge to a phase what it read in another
        self._meter.reset_peak()
        self._since = time.perf_counter()
        self._closing = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="memory-sampler", daemon=True)
        self._sampler.start()
        self._beat(NONE, NONE)

    @contextmanager
    def phase(self, name: str, role: str | None = None) -> Iterator[None]:
        """On CUDA, waits for the device at the end, so that time and memory are charged where they were caused.

        With `empty_cache`, the allocator's cache is emptied when an outermost phase begins that has another name than
        the one before: between phases, not between the micro-batches of one.
        """
        if name not in PHASES or role not in (None, *ROLES):
            raise ValueError(f"phase {name!r}, role {role!r}: the phases are {PHASES}, the roles {ROLES} or None.")
        span = Span(name, role or NONE, count=1)
        self._enter(span)
        try:
            yield
            self._meter.synchronize()
        except BaseException as error:
            if self._failed is None or self._failed[0] != id(error):
                self._failed = id(error), span
            raise
        finally:
            self._leave()

    def _enter(self, span: Span) -> None:
        self._failed = None
        with self._lock:
            self._charge()
            if len(self._open) == 1:
                if self._config.empty_cache and span.phase != self._last_outermost:
                    span.empty_cache_seconds = self._meter.empty_cache()
                self._last_outermost = span.phase
            self._open.append(span)
            self._start_anew()
        self._beat(span.phase, span.role)

    def _leave(self) -> None:
        with self._lock:
            self._charge()
            add_span(self._in_step, self._open.pop())
            self._start_anew()
        outer = self._open[-1]
        if outer.phase != NONE and self._failed is None:
            self._beat(outer.phase, outer.role)

    def _charge(self) -> Usage:
        """Charges everything since the last change of phase to the innermost one. Returns the present usage."""
        reading = self._meter.read()
        self._open[-1].see(reading)
        self._open[-1].seconds += time.perf_counter() - self._since
        self._since = time.perf_counter()
        return reading.now

    def _start_anew(self) -> None:
        self._meter.reset_peak()
        self._since = time.perf_counter()

    def _sample(self) -> None:
        while not self._closing.wait(self._config.sample_seconds):
            with self._lock:
                self._open[-1].see(self._meter.read())

    def boundary(self, step: int, **context: float) -> list[str]:
        """Ends step `step`: writes its rows, and compares what is held now with the steps before. Returns warnings.

        Call it at the same point of every step. `context` are numbers that explain growth, such as sequence_length.
        """
        usage = self._settle()
        self._step = step
        self._write_rows()
        innermost = self._open[-1]
        self._beat(innermost.phase, innermost.role)
        return self._growth.observe(step, usage, context)

    def _settle(self) -> Usage:
        """Moves what open phases have so far into the step's spans. Their visits are counted once."""
        with self._lock:
            usage = self._charge()
            for index, span in enumerate(self._open):
                if span.outside_bytes is not None:  # otherwise not innermost since the last time
                    add_span(self._in_step, span)
                self._open[index] = Span(span.phase, span.role)
            self._start_anew()
        return usage

    def _write_rows(self) -> None:
        lines = []
        for span in self._in_step.values():
            row = {"step": self._step, "rank": self._rank, "phase": span.phase, "role": span.role, **span.numbers()}
            lines.append(json.dumps(row) + "\n")
            add_span(self._in_run, span)
        self._in_step = {}
        with self._rows_path.open("a", encoding="utf-8") as file:
            file.writelines(lines)

    def rewind(self, step: int) -> None:
        """Drops rows of later steps, and a line that a kill cut short; the next rows follow on step `step`."""
        self._step = step
        if not self._rows_path.exists():
            return
        kept = []
        for line in self._rows_path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        write_text(self._rows_path, "".join(kept))

    def open_phase(self) -> tuple[str, str | None]:
        """Phase and role, innermost. While none is open: that in which an exception began, otherwise "-"."""
        span = self._open[-1]
        if span.phase == NONE and self._failed is not None:
            span = self._failed[1]
        return span.phase, None if span.role == NONE else span.role

    def allocated_bytes(self) -> int:
        """Held now: by torch on CUDA, by the process on CPU."""
        return self._meter.read().now.allocated_bytes

    def peaks(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Peaks since the start of this process by phase and role ("-": no single one), ready for JSON."""
        self._settle()
        together: Spans = {}
        for span in (*self._in_run.values(), *self._in_step.values()):
            add_span(together, span)
        table: dict[str, dict[str, dict[str, Any]]] = {}
        for span in together.values():
            table.setdefault(span.phase, {})[span.role] = span.numbers()
        return table

    def breakdown(self) -> Breakdown:
        """For each phase, what was held when its device memory was highest, and by which role's work."""
        terms = []
        for phase, roles in self.peaks().items():
            role, peak = max(roles.items(), key=lambda item: item[1]["device_bytes"])
            terms += [
                Term(self._rank, role, phase, "allocated", peak["allocated_bytes"]),
                Term(self._rank, role, phase, "fragmentation", peak["fragmentation_bytes"]),
                Term(self._rank, role, phase, "outside torch", peak["outside_torch_bytes"]),
            ]
        return Breakdown(tuple(terms))

    def close(self) -> None:
        """Stops the sampler and writes what came after the last boundary, under that boundary's step."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._sampler.join()
        self._settle()
        self._write_rows()

    def _beat(self, phase: str, role: str) -> None:
        """Tells the outside where this rank is (A16). Never fatal: a full disk must show itself elsewhere."""
        now = time.monotonic()
        if phase == self._beat_phase and now < self._heartbeat_due:
            return
        self._beat_phase, self._heartbeat_due = phase, now + HEARTBEAT_SECONDS
        beat = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "rank": self._rank,
            "step": self._step,
            "phase": phase,
            "role": None if role == NONE else role,
            "time": time.time(),
        }
        try:
            write_text(self._heartbeat_path, json.dumps(beat), durable=False)
        except OSError:
            pass
