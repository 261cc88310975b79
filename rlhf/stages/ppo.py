"""PPO on language models (arXiv 1707.06347 and 1909.08593): sample, score, update, and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf import data, distributed, losses
from rlhf.config import Config
from rlhf.data import Order, rank_slice
from rlhf.frameworks import EngineFramework, MicroBatch, Objective
from rlhf.losses import AdaptiveKl, FixedKl
from rlhf.models.export import save_adapter, save_model
from rlhf.rewarding import clamp_scores
from rlhf.stages.average import MovingAverage
from rlhf.stages.loop import Loop, update_values
from rlhf.stages.roles import build_roles
from rlhf.stages.rollout import Roles, Rollout, Sampler, answer_values
from rlhf.stages.sft import sft_batch, sft_objective
from rlhf.stages.supervised import chunks, rows_of_rank

if TYPE_CHECKING:
    from rlhf.worker import Run

# Held-out prompts are sampled with the same numbers before and after, apart from every training step's.
HELDOUT_STEP = 2**30


def ppo(config: Config, framework: EngineFramework, run: Run) -> dict[str, float]:
    stage = run.stage
    split = run.load_data("prompts")
    demonstrations = run.load_data("sft").train if stage.ptx_coefficient else []
    roles = build_roles(config, framework, run)
    sampler = Sampler(config, run, roles)
    kl = (
        AdaptiveKl(stage.kl_coefficient, stage.kl_target, stage.kl_horizon)
        if stage.kl_target
        else FixedKl(stage.kl_coefficient)
    )
    average = MovingAverage(roles.actor, stage.ema_decay) if stage.ema_decay else None
    history: dict[str, Any] = {"before": {}, "best": -math.inf}

    def restore(state: dict[str, Any]) -> None:
        kl.load(state["kl"])
        history.update(state["history"])

    loop = Loop(
        run,
        {"actor": roles.actor, "critic": roles.critic},
        stage.steps,
        state=lambda: {"kl": kl.state(), "history": history},
        restore=restore,
        tensors=average.tensors if average else dict,
        restore_tensors=average.load if average else lambda tensors: None,
    )
    if loop.fresh:
        history["before"] = evaluate(run, sampler, split.heldout, 0)
    learner = Learner(config, run, roles, demonstrations, loop, average)
    order, final, done = Order(len(split.train), config.seed), {}, loop.start
    for step in loop:
        # 1. sample answers to this rank's share of the prompts, and score them
        rows = rank_slice(list(range(stage.rollout_batch)), run.rank, run.world_size)
        batch = order.batch(step, stage.rollout_batch)
        rollout = sampler.rollout([split.train[batch[row]] for row in rows], rows, step)
        # 2. turn scores into advantages and returns, 3. learn from them
        targets, final = learning_targets(config, run, rollout, kl.coefficient)
        final |= learner.learn(step, rollout, targets)
        # 4. steer the penalty, 5. record
        kl.update(final["kl/per_answer"], stage.rollout_batch)
        done = step + 1
        final["reward/over_start"] = final["reward/mean"] - history["before"]["reward/heldout_mean"]
        run.recorder.log(done, final)
        run.tokens = distributed.sum_over_ranks({"tokens": rollout.attention_mask.sum()}, run.device)["tokens"]
        loop.headline = {"reward": final["reward/mean"], "kl": final["kl/per_answer"]}
        if stage.sample_every and done % stage.sample_every == 0:
            run.recorder.samples(done, sample_rows(rollout, "train"))
        if stage.eval_every and done % stage.eval_every == 0 and done < stage.steps:
            keep_best(loop, history, evaluate(run, sampler, split.heldout, done), done)
        if stage.kl_stop is not None and final["kl/per_answer"] > stage.kl_stop:
            loop.end(step, f"KL per answer {final['kl/per_answer']:.3g} passed stage.kl_stop={stage.kl_stop:g}")
    after = evaluate(run, sampler, split.heldout, done)
    save(config, run, roles, average)
    return {
        **final,
        "heldout_reward_before": history["before"]["reward/heldout_mean"],
        "heldout_reward_before_std": history["before"]["reward/heldout_std"],
        "heldout_reward_after": after["reward/heldout_mean"],
        "heldout_reward_after_std": after["reward/heldout_std"],
    }


def learning_targets(
    config: Config, run: Run, rollout: Rollout, coefficient: float
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Advantages and returns, (rows, answer tokens), and what is worth knowing about the rollout (A30, A33)."""
    stage = run.stage
    mask = rollout.mask
    scores = clamp_scores(rollout.scores, config.reward)
    if stage.truncated_answers == "penalise":
        scores = scores - stage.truncation_penalty * rollout.truncated
    signed = losses.kl_signed(rollout.log_probs, rollout.reference)
    rewards = losses.token_rewards(scores, signed, mask, coefficient)
    advantages, returns = losses.advantages(rewards, rollout.values, mask, stage.gamma, stage.gae_lambda)
    learned = mask * ~rollout.truncated[:, None] if stage.truncated_answers == "mask" else mask
    if stage.whiten_advantages:
        moments = over_ranks(run, losses.masked_moments(advantages, learned))
        advantages = losses.whiten(advantages, learned, moments.mean, moments.variance)
    residual = over_ranks(run, losses.masked_moments(returns - rollout.values, learned))
    spread = over_ranks(run, losses.masked_moments(returns, learned))
    answers = torch.ones_like(scores)
    raw = over_ranks(run, losses.masked_moments(rollout.scores, answers))
    nonnegative = losses.kl_nonnegative(rollout.log_probs, rollout.reference)
    sums = distributed.sum_over_ranks(
        {
            "answers": answers.sum(),
            "tokens": mask.sum(),
            "kl/signed": losses.masked_sum(signed, mask),
            "kl/nonnegative": losses.masked_sum(nonnegative, mask),
            "entropy": losses.masked_sum(rollout.entropy, mask),
            "sampling/log_prob_gap": losses.masked_sum((rollout.sampled - rollout.log_probs).abs(), mask),
            "answer/truncated": rollout.truncated.sum(),
        },
        run.device,
    )
    values = {
        name: sums[name] / max(sums["tokens"], 1.0)
        for name in ("kl/signed", "kl/nonnegative", "entropy", "sampling/log_prob_gap")
    }
    values |= {
        "reward/mean": raw.mean,
        "reward/std": raw.variance**0.5,
        "kl/per_answer": sums["kl/signed"] / sums["answers"],
        "kl/coefficient": coefficient,
        "answer/length": sums["tokens"] / sums["answers"],
        "answer/truncated": sums["answer/truncated"] / sums["answers"],
        "explained_variance": losses.explained_variance(residual, spread),
    }
    return {"advantages": advantages, "returns": returns, "learned": learned}, values


def over_ranks(run: Run, moments: losses.Moments) -> losses.Moments:
    return losses.Moments(**distributed.sum_over_ranks(moments._asdict(), run.device))


class Learner:
    """Updates actor and critic from a rollout: `ppo_epochs` passes in mini-batches of `total_batch` answers."""

    def __init__(
        self, config: Config, run: Run, roles: Roles, demonstrations: Sequence[data.Demonstration], loop: Loop, average
    ):
        self.config, self.stage, self.run, self.roles = config, run.stage, run, roles
        self.demonstrations, self.loop, self.average = demonstrations, loop, average
        self.ptx_order = Order(max(1, len(demonstrations)), config.seed)

    def learn(self, step: int, rollout: Rollout, targets: dict[str, Tensor]) -> dict[str, float]:
        """Returns the updates' metrics, averaged; maxima stay maxima."""
        collected: dict[str, list[float]] = {}
        local = self.stage.total_batch // self.run.world_size
        for epoch in range(self.stage.ppo_epochs):
            for number, indices in enumerate(chunks(self._shuffled(step, epoch, len(rollout.rows)), local)):
                parts = chunks(indices, self.stage.micro_batch)
                for name, value in self._update(step, epoch, number, rollout, targets, parts).items():
                    collected.setdefault(name, []).append(value)
        return {name: max(v) if name.endswith("/max") else sum(v) / len(v) for name, v in collected.items()}

    def _shuffled(self, step: int, epoch: int, count: int) -> list[int]:
        """Depends on seed, step and epoch alone, so that a resumed run sees the same mini-batches."""
        generator = torch.Generator().manual_seed((self.config.seed * 1_000_003 + step) * 1_000_003 + epoch)
        return torch.randperm(count, generator=generator).tolist()

    def _update(self, step: int, epoch: int, number: int, rollout: Rollout, targets, parts) -> dict[str, float]:
        run, stage, precision = self.run, self.stage, self.config.precision.dtype
        batches = [self._micro_batch(rollout, targets, part) for part in parts]
        metrics: dict[str, float] = {}
        if step >= stage.critic_warmup_steps:
            actor_batches = self._with_demonstrations(batches, step, epoch, number)
            with run.monitor.phase("update", "actor"):
                update = self.roles.actor.update(actor_batches, self._actor_objective)
                if self.average is not None and not update.skipped:
                    self.average.update()
            self.loop.check(update, "actor", step, rollout.rows)
            metrics |= update_values(update, precision, "/actor") | _named(update.metrics, "loss/actor")
        with run.monitor.phase("update", "critic"):
            update = self.roles.critic.update(batches, self._critic_objective)
        self.loop.check(update, "critic", step, rollout.rows)
        return metrics | update_values(update, precision, "/critic") | _named(update.metrics, "loss/critic")

    def _micro_batch(self, rollout: Rollout, targets: dict[str, Tensor], indices: list[int]) -> MicroBatch:
        chosen = torch.tensor(indices, device=self.run.device)
        tensors = {name: value[chosen] for name, value in {**rollout.tensors(), **targets}.items()}
        weights = {"tokens": tensors["learned"].sum().item()}
        return MicroBatch({**tensors, "answer_start": rollout.answer_start}, weights)

    def _with_demonstrations(self, batches: list[MicroBatch], step: int, epoch: int, number: int) -> list[MicroBatch]:
        """Adds rows of the sft data to each micro-batch, if their loss is mixed in."""
        if not self.stage.ptx_coefficient:
            return batches
        per_rollout = self.stage.ppo_epochs * self.stage.rollout_batch // self.stage.total_batch
        at = step * per_rollout + epoch * (per_rollout // self.stage.ppo_epochs) + number
        rows = rank_slice(self.ptx_order.batch(at, self.stage.total_batch), self.run.rank, self.run.world_size)
        mixed = []
        for batch, part in zip(batches, chunks(rows, self.stage.micro_batch), strict=True):
            ptx = sft_batch(
                [self.demonstrations[row] for row in part], self.run.tokenizer.pad_token_id, self.run.device
            )
            mixed.append(
                MicroBatch({**batch.inputs, "ptx": ptx.inputs}, {**batch.weights, "ptx_tokens": ptx.weights["tokens"]})
            )
        return mixed

    def _actor_objective(self, model, inputs: dict[str, Any], total: dict[str, float]) -> Objective:
        stage = self.stage
        log_probs, entropy = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            answer_start=inputs["answer_start"],
            temperature=stage.temperature,
            with_entropy=stage.entropy_coefficient > 0,
        )
        mask, old = inputs["learned"], inputs["log_probs"]
        summed = losses.policy_loss(log_probs, old, inputs["advantages"], mask, stage.clip_ratio)
        loss = summed.total / total["tokens"]
        if entropy is not None:
            loss = loss - stage.entropy_coefficient * losses.masked_sum(entropy, mask) / total["tokens"]
        metrics = {name: value / total["tokens"] for name, value in summed.metrics.items()}
        if "ptx" in inputs:
            ptx = sft_objective(model, inputs["ptx"], {"tokens": total["ptx_tokens"]})
            loss = loss + stage.ptx_coefficient * ptx.loss
            metrics["loss/ptx"] = ptx.loss.detach()
        return Objective(loss, metrics, {"ratio/max": losses.ratio_max(log_probs, old, mask)})

    def _critic_objective(self, model, inputs: dict[str, Any], total: dict[str, float]) -> Objective:
        values = answer_values(model, inputs["input_ids"], inputs["attention_mask"], inputs["answer_start"])
        summed = losses.value_loss(
            values, inputs["values"], inputs["returns"], inputs["learned"], self.stage.clip_value
        )
        metrics = {name: value / total["tokens"] for name, value in summed.metrics.items()}
        return Objective(summed.total / total["tokens"], metrics)


def _named(metrics: dict[str, float], loss_name: str) -> dict[str, float]:
    return {loss_name if name == "loss" else name: value for name, value in metrics.items()}


@torch.no_grad()
def evaluate(run: Run, sampler: Sampler, heldout: Sequence[data.Prompt], step: int) -> dict[str, float]:
    """Mean and deviation of the reward on held-out prompts, each sampled with the same random numbers every time."""
    prompts = heldout[: run.stage.eval_samples]
    per_rank = math.ceil(len(prompts) / run.world_size)
    mine = rows_of_rank(len(prompts), run.rank, run.world_size, per_rank)[0]
    with run.monitor.phase("evaluate"):
        rollout = sampler.rollout([prompts[row] for row, _ in mine], [row for row, _ in mine], HELDOUT_STEP)
        counted = torch.tensor([weight for _, weight in mine], device=run.device)
        moments = over_ranks(run, losses.masked_moments(rollout.scores, counted))
    values = {"reward/heldout_mean": moments.mean, "reward/heldout_std": moments.variance**0.5}
    run.recorder.log(step, values)
    rows = [row for row, weight in zip(sample_rows(rollout, "heldout"), counted.tolist(), strict=True) if weight]
    run.recorder.samples(step, [row for part in distributed.gather_objects(rows) for row in part])
    return values


def sample_rows(rollout: Rollout, split: str) -> list[dict[str, Any]]:
    """Rows of samples.jsonl."""
    kl = (losses.kl_signed(rollout.log_probs, rollout.reference) * rollout.mask).sum(1).tolist()
    lengths, scores = rollout.mask.sum(1).tolist(), rollout.scores.tolist()
    return [
        {
            "split": split,
            "prompt": prompt,
            "answer": answer,
            "reward": score,
            "kl": row_kl,
            "length": length,
            "truncated": cut,
        }
        for prompt, answer, score, row_kl, length, cut in zip(
            rollout.prompts, rollout.answers, scores, kl, lengths, rollout.truncated.tolist(), strict=True
        )
    ]


def keep_best(loop: Loop, history: dict[str, Any], values: dict[str, float], done: int) -> None:
    """The checkpoint with the best held-out reward survives pruning, whatever comes after (A34)."""
    if values["reward/heldout_mean"] > history["best"]:
        history["best"] = values["reward/heldout_mean"]
        loop.checkpoints.best = f"step_{done:08d}"
        loop.save(done)


def save(config: Config, run: Run, roles: Roles, average: MovingAverage | None) -> None:
    actor, critic = roles.actor, roles.critic
    with run.monitor.phase("save", "actor"):
        save_model(actor.module, actor.gathered, run.tokenizer, run.folder / "model")
        if config.lora.enabled:
            save_adapter(actor.module, actor.gathered, run.source_name, run.folder / "adapter")
        if average is not None:
            with average.in_place():
                save_model(actor.module, actor.gathered, run.tokenizer, run.folder / "ema_model")
    with run.monitor.phase("save", "critic"):
        save_model(critic.module, critic.gathered, run.tokenizer, run.folder / "critic")
