"""A copy of the record in Weights & Biases, behind a queue: it can neither stop training nor slow it down (A53)."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.config import Config

INIT_SECONDS = 30.0  # a server that has not answered by then is given up
CLOSE_SECONDS = 30.0  # for uploading what is left when the run ends; `wandb sync` sends the rest later
QUEUE_SIZE = 10_000

Update = Callable[[Any], None]  # what to do with the wandb run


class Tracker:
    """One W&B run for one stage, offline unless `config.wandb.mode` says otherwise; its files go to <folder>/wandb.

    A daemon thread is the only one that touches wandb. Methods put an update on a bounded queue and return; when the
    queue is full the update is dropped and counted. The first error is printed as one line and ends the tracking.
    Names get the stage as prefix, and every one is drawn over <stage>/step.
    """

    def __init__(self, folder: Path, stage: str, config: Config, enabled: bool = True, group: str | None = None):
        self._folder = folder
        self._stage = stage
        self._config = config
        self._group = group or config.wandb.group or group_of(folder)
        self._updates: queue.Queue[Update | None] = queue.Queue(maxsize=QUEUE_SIZE)
        self._dropped = 0
        self._on = enabled and config.wandb.mode != "disabled"
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        if self._on:
            self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        row = self._row(step, values)
        self._put(lambda run: run.log(row))

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        def send(run: Any) -> None:
            import wandb

            columns: list[Any] = list(dict.fromkeys(key for row in rows for key in row))
            table = wandb.Table(columns=columns, data=[[row.get(key) for key in columns] for row in rows])
            run.log(self._row(step, {name: table}))

        self._put(send)

    def images(self, paths: list[Path]) -> None:
        def send(run: Any) -> None:
            import wandb

            run.log({f"{self._stage}/plots/{path.stem}": wandb.Image(str(path)) for path in paths})

        if paths:
            self._put(send)

    def close(self, summary: Mapping[str, float], failed: bool) -> None:
        """Put the final values in the run's summary and end it; returns within `CLOSE_SECONDS`."""
        if not self._on:
            return
        final = {f"{self._stage}/final/{name}": value for name, value in summary.items()}

        def end(run: Any) -> None:
            run.summary.update(final)
            run.finish(exit_code=int(failed))

        deadline = time.monotonic() + CLOSE_SECONDS
        try:
            for update in (end, None):
                self._updates.put(update, timeout=max(0, deadline - time.monotonic()))
        except queue.Full:
            pass
        self._thread.join(max(0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._give_up(f"it did not finish within {CLOSE_SECONDS:g} s")
        elif self._dropped:
            _say(f"W&B was too slow for {self._dropped} updates; metrics.jsonl has them.")

    def _row(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{self._stage}/step": step} | {f"{self._stage}/{name}": value for name, value in values.items()}

    def _put(self, update: Update) -> None:
        if not self._on:
            return
        try:
            self._updates.put_nowait(update)
        except queue.Full:
            self._dropped += 1

    def _work(self) -> None:
        try:
            run = self._start()
            while (update := self._updates.get()) is not None:
                update(run)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])

    def _give_up(self, reason: str) -> None:
        if self._on:
            self._on = False
            _say(f"W&B is off for the rest of this run ({reason}); metrics.jsonl has everything.")

    def _start(self) -> Any:
        folder = self._folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_DATA_DIR", str(folder))
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
        import wandb

        chosen = self._config.wandb
        # Without a key wandb.init would ask for one on the terminal, over the progress bar.
        if chosen.mode == "online" and not wandb.login(prompt=False):
            raise ValueError("wandb.mode=online needs an API key; run `wandb login` or set WANDB_API_KEY")
        run = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            group=self._group,
            name=chosen.name,
            tags=list(chosen.tags),
            job_type=self._stage,
            mode=chosen.mode,
            dir=str(self._folder),
            resume="auto",
            config=self._config.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=INIT_SECONDS,
                finish_timeout=CLOSE_SECONDS,
                disable_code=True,
                x_disable_stats=True,  # the memory monitor's numbers are the ones to trust
                x_save_requirements=False,
            ),
        )
        run.define_metric(f"{self._stage}/step", hidden=True)
        run.define_metric(f"{self._stage}/*", step_metric=f"{self._stage}/step")
        return run


def group_of(folder: Path) -> str:
    """The sweep that the run belongs to (Hydra leaves multirun.yaml in its folder), else the run itself.

    The stages of stage=all live in folders named after them inside the run's.
    """
    run = folder.resolve()
    if run.name in ("sft", "rm", "ppo"):
        run = run.parent
    sweep = next((parent for parent in run.parents[:2] if (parent / "multirun.yaml").exists()), None)
    chosen = sweep or run
    return f"{chosen.parent.name}/{chosen.name}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
