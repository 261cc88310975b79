"""Supervised fine-tuning: the loss of the answer's tokens, given the prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rlhf import data, distributed
from rlhf.config import Config
from rlhf.frameworks import EngineFramework, MicroBatch, Objective
from rlhf.losses import sft_loss
from rlhf.models.build import build_policy
from rlhf.models.export import save_adapter, save_model
from rlhf.stages.supervised import fit, on_device, optimizer_settings, rows_of_rank, steps_for

if TYPE_CHECKING:
    from rlhf.worker import Run


def sft_batch(rows: Sequence[data.Demonstration], pad_id: int, device: torch.device) -> MicroBatch:
    inputs = data.collate([row.prompt_ids for row in rows], [row.answer_ids for row in rows], pad_id)
    start = max(len(row.prompt_ids) for row in rows)
    tokens = inputs["answer_mask"].sum().item()
    return MicroBatch(on_device({**inputs, "answer_start": start}, device), {"tokens": tokens})


def packed_batch(rows: Sequence[data.Demonstration], length: int, pad_id: int, device: torch.device) -> MicroBatch:
    inputs = data.pack(rows, length, pad_id)
    tokens = inputs["answer_mask"][:, 1:].sum().item()
    return MicroBatch(on_device({**inputs, "answer_start": 1}, device), {"tokens": tokens})


def sft_objective(model, inputs, total) -> Objective:
    start = inputs["answer_start"]
    log_probs, _ = model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        answer_start=start,
        segment_ids=inputs.get("segment_ids"),
    )
    summed = sft_loss(log_probs, inputs["answer_mask"][:, start:])
    return Objective(
        summed.total / total["tokens"], {name: value / total["tokens"] for name, value in summed.metrics.items()}
    )


def sft(config: Config, framework: EngineFramework, run: Run) -> dict[str, float]:
    stage, pad_id = run.stage, run.tokenizer.pad_token_id
    split = run.load_data("sft")
    steps = steps_for(stage, len(split.train))

    with run.monitor.phase("load", "actor"), framework.building(trains=True):
        model = build_policy(config, run.source, run.tokenizer, run.device, adapters=True)
    with run.monitor.phase("initialise", "actor"):
        engine = framework.trainable(model, optimizer_settings(run, stage.learning_rate, steps), "actor")

    def make_batch(rows: Sequence[data.Demonstration]) -> MicroBatch:
        if stage.packing:
            return packed_batch(rows, config.data.max_length, pad_id, run.device)
        return sft_batch(rows, pad_id, run.device)

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        heldout = split.heldout[: stage.eval_samples]
        sums = {"loss": 0.0, "tokens": 0.0}
        for part in rows_of_rank(len(heldout), run.rank, run.world_size, stage.micro_batch):
            batch = sft_batch([heldout[row] for row, _ in part], pad_id, run.device)
            counted = torch.tensor([weight for _, weight in part], device=run.device)
            batch.inputs["answer_mask"] *= counted.long()[:, None]
            sums["loss"] += sft_objective(engine, batch.inputs, {"tokens": 1.0}).loss.item()
            sums["tokens"] += batch.inputs["answer_mask"].sum().item()
        sums = distributed.sum_over_ranks(sums, run.device)
        loss = sums["loss"] / max(sums["tokens"], 1.0)
        return {"heldout/loss": loss, "heldout/perplexity": math.exp(min(loss, 700.0))}

    metrics = fit(run, "actor", engine, split.train, make_batch, sft_objective, evaluate, steps)
    with run.monitor.phase("save", "actor"):
        save_model(engine.module, engine.gathered, run.tokenizer, run.folder / "model")
        if config.lora.enabled:
            save_adapter(engine.module, engine.gathered, run.source_name, run.folder / "adapter")
    return {**metrics, "heldout_loss": metrics["heldout/loss"], "heldout_perplexity": metrics["heldout/perplexity"]}
