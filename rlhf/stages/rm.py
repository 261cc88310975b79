"""The reward model: a scalar head, trained so that the chosen answer scores above the rejected one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf import data, distributed
from rlhf.config import Config
from rlhf.frameworks import Engine, EngineFramework, MicroBatch, Objective
from rlhf.losses import pairwise_loss
from rlhf.models.build import build_scalar
from rlhf.models.export import save_adapter, save_model, save_reward_statistics
from rlhf.models.heads import score_at_last_token
from rlhf.stages.supervised import fit, on_device, optimizer_settings, rows_of_rank, steps_for

if TYPE_CHECKING:
    from rlhf.worker import Run


def preference_batch(rows: Sequence[data.Preference], pad_id: int, device: torch.device) -> MicroBatch:
    """Chosen answers in the first half of the rows, rejected ones in the second: one forward pass for both."""
    prompts = [row.prompt_ids for row in rows]
    answers = [row.chosen_ids for row in rows] + [row.rejected_ids for row in rows]
    return MicroBatch(on_device(data.collate(prompts + prompts, answers, pad_id), device), {"pairs": float(len(rows))})


def pair_scores(model, inputs) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected answers, (pairs,) each."""
    scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    chosen, rejected = score_at_last_token(scores, inputs["attention_mask"]).chunk(2)
    return chosen, rejected


def rm_objective(model, inputs, total) -> Objective:
    summed = pairwise_loss(*pair_scores(model, inputs))
    return Objective(
        summed.total / total["pairs"], {name: value / total["pairs"] for name, value in summed.metrics.items()}
    )


@torch.no_grad()
def score_sums(run: Run, engine: Engine, rows: Sequence[data.Preference]) -> dict[str, float]:
    """Sums over `rows` and all ranks: pairs, correct, margin, loss, and of the scores their sum and sum of squares."""
    names = ("pairs", "correct", "margin", "loss", "scores", "squares")
    sums: dict[str, float | Tensor] = dict.fromkeys(names, 0.0)
    for part in rows_of_rank(len(rows), run.rank, run.world_size, run.stage.micro_batch):
        batch = preference_batch([rows[row] for row, _ in part], run.tokenizer.pad_token_id, run.device)
        weight = torch.tensor([weight for _, weight in part], device=run.device)
        chosen, rejected = pair_scores(engine, batch.inputs)
        sums["pairs"] += weight.sum().item()
        sums["correct"] += (weight * (chosen > rejected)).sum().item()
        sums["margin"] += (weight * (chosen - rejected)).sum().item()
        sums["loss"] -= (weight * torch.nn.functional.logsigmoid(chosen - rejected)).sum().item()
        sums["scores"] += (weight * (chosen + rejected)).sum().item()
        sums["squares"] += (weight * (chosen**2 + rejected**2)).sum().item()
    return distributed.sum_over_ranks(sums, run.device)


def rm(config: Config, framework: EngineFramework, run: Run) -> dict[str, float]:
    stage = run.stage
    split = run.load_data("preferences")
    steps = steps_for(stage, len(split.train))

    with run.monitor.phase("load", "reward"), framework.building(trains=True):
        model = build_scalar(config, run.source, run.tokenizer, run.device, adapters=True, trained_head=False)
    with run.monitor.phase("initialise", "reward"):
        engine = framework.trainable(model, optimizer_settings(run, stage.learning_rate, steps), "reward")

    def make_batch(rows: Sequence[data.Preference]) -> MicroBatch:
        return preference_batch(rows, run.tokenizer.pad_token_id, run.device)

    def evaluate() -> dict[str, float]:
        sums = score_sums(run, engine, split.heldout[: stage.eval_samples])
        return {f"heldout/{name}": sums[key] / sums["pairs"] for name, key in HELDOUT.items()}

    metrics = fit(run, "reward", engine, split.train, make_batch, rm_objective, evaluate, steps)
    statistics: dict[str, float] = {}
    if stage.save_reward_statistics:
        with run.monitor.phase("evaluate", "reward"):
            sums = score_sums(run, engine, split.train[: stage.statistics_samples])
        count = 2 * sums["pairs"]
        mean = sums["scores"] / count
        statistics = {"mean": mean, "std": max(sums["squares"] / count - mean**2, 0.0) ** 0.5, "count": int(count)}
    with run.monitor.phase("save", "reward"):
        save_model(engine.module, engine.gathered, run.tokenizer, run.folder / "model")
        if config.lora.enabled:
            save_adapter(engine.module, engine.gathered, run.source_name, run.folder / "adapter")
        if statistics and run.rank == 0:
            save_reward_statistics(run.folder / "model", **statistics)
    return {
        **metrics,
        **{f"reward/train_{name}": value for name, value in statistics.items() if name != "count"},
        "rm_accuracy": metrics["heldout/accuracy"],
        "rm_margin": metrics["heldout/margin"],
        "heldout_loss": metrics["heldout/loss"],
    }


HELDOUT = {"loss": "loss", "accuracy": "correct", "margin": "margin"}
