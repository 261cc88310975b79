"""The loop that sft and rm share: batches in a fixed order, one optimizer step each, held-out numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlhf import distributed
from rlhf.data import Order, rank_slice
from rlhf.frameworks import Engine, Loss, MicroBatch, OptimizerSettings
from rlhf.stages.loop import Loop, update_values

if TYPE_CHECKING:
    from rlhf.worker import Run


T = TypeVar("T")


def optimizer_settings(run: Run, learning_rate: float, steps: int) -> OptimizerSettings:
    stage = run.stage
    return OptimizerSettings(
        learning_rate=learning_rate,
        adapter_learning_rate=run.config.lora.learning_rate or learning_rate,
        betas=stage.betas,
        weight_decay=stage.weight_decay,
        schedule=stage.schedule,
        warmup_steps=stage.warmup_steps,
        steps=steps,
        micro_batch=stage.micro_batch,
        accumulation=stage.accumulation,
    )


def steps_for(stage, rows: int) -> int:
    """Optimizer steps of a supervised stage: `steps`, or as many as the epochs give."""
    return stage.steps if stage.steps is not None else math.ceil(rows * stage.epochs / stage.total_batch)


def chunks(items: Sequence[T], size: int) -> list[Sequence[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def on_device(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def rows_of_rank(count: int, rank: int, world_size: int, size: int) -> list[Sequence[tuple[int, float]]]:
    """Held-out rows of a rank in batches of `size`, as (row, weight). Every rank gets as many batches of equal size:
    rows that fill up weigh 0, so that sums over ranks count each row once and collectives stay in step (A17)."""
    per_rank = math.ceil(count / world_size)
    mine = [(min(row, count - 1), float(row < count)) for row in range(rank * per_rank, (rank + 1) * per_rank)]
    return chunks(mine, size)


def fit(
    run: Run,
    role: str,
    engine: Engine,
    rows: Sequence[Any],
    make_batch: Callable[[Sequence[Any]], MicroBatch],
    loss: Loss,
    evaluate: Callable[[], dict[str, float]],
    steps: int,
) -> dict[str, float]:
    """Trains for `steps` optimizer steps and returns the final and the held-out metrics (prefix `heldout/`)."""
    stage, precision = run.stage, run.config.precision.dtype
    order = Order(len(rows), run.config.seed)
    loop = Loop(run, {role: engine}, steps)
    if loop.fresh:
        with run.monitor.phase("evaluate", role):
            run.recorder.log(0, evaluate())
    final: dict[str, float] = {}
    for step in loop:
        indices = rank_slice(order.batch(step, stage.total_batch), run.rank, run.world_size)
        micro_batches = [make_batch([rows[i] for i in part]) for part in chunks(indices, stage.micro_batch)]
        with run.monitor.phase("update", role):
            update = engine.update(micro_batches, loss)
        loop.check(update, role, step, indices)
        final = {**update.metrics, **update_values(update, precision)}
        run.recorder.log(step + 1, final)
        loop.headline = {name: final[name] for name in ("loss", "accuracy") if name in final}
        tokens = sum(batch.inputs["attention_mask"].sum().item() for batch in micro_batches)
        run.tokens = distributed.sum_over_ranks({"tokens": tokens}, run.device)["tokens"]
        if stage.eval_every and (step + 1) % stage.eval_every == 0 and step + 1 < steps:
            with run.monitor.phase("evaluate", role):
                run.recorder.log(step + 1, evaluate())
    with run.monitor.phase("evaluate", role):
        heldout = evaluate()
    run.recorder.log(steps, heldout)
    return {**final, **heldout}
