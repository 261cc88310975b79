"""What every stage's loop does around its steps: resume, record, guard against NaN, save, stop when asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlhf import distributed
from rlhf.checkpoint import Checkpoints
from rlhf.frameworks import Engine, Update

if TYPE_CHECKING:
    from rlhf.worker import Run


class Interrupted(Exception):
    """The user asked the run to stop; a checkpoint has been written."""


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient norm of a role became inf or NaN (A28)."""


class LossScaleError(RuntimeError):
    """fp16 overflowed in too many steps in a row (A27)."""


class Loop:
    """Iterating yields the 0-based steps still to do; the end of each step happens when the next one is asked for.

    `state` returns what else must be saved, JSON-ready; `restore` takes it back. `tensors` and `restore_tensors`
    likewise, for this rank's tensors.
    """

    def __init__(
        self,
        run: Run,
        engines: Mapping[str, Engine],
        steps: int,
        state: Callable[[], dict[str, Any]] = dict,
        restore: Callable[[dict[str, Any]], None] = lambda state: None,
        tensors: Callable[[], dict[str, torch.Tensor]] = dict,
        restore_tensors: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    ):
        self.run, self.engines, self.steps = run, engines, steps
        self.state, self.tensors = state, tensors
        self.checkpoints = Checkpoints(run.folder, run.stage.keep_checkpoints)
        self.start, self.skipped_in_a_row = 0, 0
        self.headline: dict[str, float] = {}
        self._ended: str | None = None
        if run.resuming:
            self._resume(restore, restore_tensors)
        if self.fresh:
            for kind, counts in run.dropped.items():
                run.recorder.event(0, "dropped_rows", data=kind, rows=counts)

    def _resume(self, restore, restore_tensors) -> None:
        folder, messages = self.checkpoints.newest()
        if folder is not None:
            state, tensors = self.checkpoints.load(folder, self.engines)
            self.start, self.skipped_in_a_row = state["step"], state["skipped_in_a_row"]
            self.checkpoints.best = state["best"]
            restore(state["stage"])
            restore_tensors(tensors)
        last = self.start if folder is not None else -1
        self.run.recorder.rewind(last)
        self.run.monitor.rewind(last)
        self.run.steps_done = self.start
        for message in messages:
            self.run.note(message)
        self.run.note(
            f"resumed after step {self.start}" if folder else "no whole checkpoint to resume from: starting at step 0"
        )

    @property
    def fresh(self) -> bool:
        """Nothing has been trained yet, so what is measured now is the state before training."""
        return self.start == 0

    def __iter__(self) -> Iterator[int]:
        with self.run.progress(self.steps) as progress:
            for step in range(self.start, self.steps):
                began = time.perf_counter()
                yield step
                self._end_step(step + 1, time.perf_counter() - began, progress)
                if self._ended is not None:
                    break

    def _end_step(self, done: int, seconds: float, progress) -> None:
        run, stage = self.run, self.run.stage
        run.steps_done = done
        rates = {"samples_per_second": self._samples_per_step() / seconds, "tokens_per_second": run.tokens / seconds}
        run.recorder.time(done, {"seconds": seconds, **rates})
        if stage.save_every and done % stage.save_every == 0 and done < self.steps:
            self.save(done)
        for warning in run.monitor.boundary(done, tokens=run.tokens):
            run.recorder.event(done, "memory_warning", repeatable=False, message=warning)
            run.note(warning)
        run.recorder.memory(done, run.monitor.peaks())
        progress.advance(done, self.headline, run.monitor.allocated_bytes())
        if distributed.max_over_ranks(float(run.stop_requested()), run.device) and done < self.steps:
            self.save(done)
            raise Interrupted

    def _samples_per_step(self) -> int:
        stage = self.run.stage
        return stage.rollout_batch if stage.name == "ppo" else stage.total_batch

    def save(self, done: int) -> None:
        extra = {"stage": self.state(), "skipped_in_a_row": self.skipped_in_a_row, "best": self.checkpoints.best}
        with self.run.monitor.phase("save"):
            self.checkpoints.save(done, self.engines, extra, self.tensors())

    def end(self, step: int, reason: str) -> None:
        """This step is the last one."""
        self._ended = reason
        self.run.recorder.event(step + 1, "early_stop", reason=reason)
        self.run.note(f"stopping after step {step + 1}: {reason}")

    def check(self, update: Update, role: str, step: int, rows: list[int]) -> None:
        """Stops a run whose numbers have gone wrong, naming where, before it writes NaN into the weights' history."""
        precision = self.run.config.precision
        if update.skipped and precision.dtype == "fp16":
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= precision.max_skipped_steps:
                raise LossScaleError(
                    f"{self.skipped_in_a_row} optimizer steps of the {role} in a row overflowed in fp16, loss scale "
                    f"{update.loss_scale:g} at step {step + 1}: lower the learning rate, or use precision=bf16"
                )
            return
        self.skipped_in_a_row = 0
        broken = [name for name, value in update.metrics.items() if not math.isfinite(value)]
        if update.skipped or not math.isfinite(update.grad_norm):
            broken.append("grad_norm")
        if broken:
            raise NonFiniteLossError(
                f"{', '.join(broken)} of the {role} is inf or NaN at step {step + 1}, data rows {rows[:8]} of rank "
                f"{self.run.rank}; what was learnt is in the last checkpoint. Lower the learning rate, "
                "or use precision=bf16 or fp32"
            )


def update_values(update: Update, precision: str, suffix: str = "") -> dict[str, float]:
    """The numbers of an optimizer step under the names of metrics.jsonl."""
    values = {f"grad_norm{suffix}": update.grad_norm, f"learning_rate{suffix}": update.learning_rate}
    if precision == "fp16":
        values |= {f"loss_scale{suffix}": update.loss_scale, f"skipped_steps{suffix}": float(update.skipped)}
    return values
