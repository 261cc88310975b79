"""A rollout: answers sampled from the actor, with everything the update needs to know about each of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rlhf import data
from rlhf.config import Config
from rlhf.frameworks import Engine, Frozen
from rlhf.generation import Answers, NonFiniteLogitsError, Sampling, generate, uniforms
from rlhf.rewarding import Reward

if TYPE_CHECKING:
    from rlhf.worker import Run


@dataclass(frozen=True)
class Roles:
    """PPO's four models. `reference` gives log-probs like the actor's; with LoRA it is the actor without adapters
    (A26)."""

    actor: Engine
    critic: Engine
    reference: Frozen
    reward: Reward


class AdapterlessActor(Frozen):
    """The actor's base model as reference: no second copy of the weights."""

    def __init__(self, actor: Engine):
        self.actor, self.module = actor, actor.module

    @torch.no_grad()
    def __call__(self, **inputs):
        with self.module.without_adapters():
            return self.actor(**inputs)

    def resident(self):
        return nullcontext()


@dataclass
class Rollout:
    """One rank's rows R of a rollout, T columns of which the last A are the answer's; `mask` is (R, A).

    `log_probs`, `reference`, `values` are (R, A); `scores` (R,) are as the reward gave them; `sampled` are the
    log-probs that generation saw, for comparison with `log_probs`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    truncated: Tensor
    sampled: Tensor
    log_probs: Tensor
    reference: Tensor
    values: Tensor
    scores: Tensor
    entropy: Tensor
    prompts: list[str]
    answers: list[str]
    rows: list[int]

    @property
    def answer_start(self) -> int:
        return self.input_ids.shape[1] - self.mask.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}


def sampling_of(config: Config, stage, tokenizer) -> Sampling:
    return Sampling(
        temperature=stage.temperature,
        top_p=stage.top_p,
        top_k=stage.top_k,
        max_new_tokens=config.data.max_answer_length,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )


def prompt_batch(prompts: Sequence[data.Prompt], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = data.collate([p.prompt_ids for p in prompts], [()] * len(prompts), pad_id)
    return batch["input_ids"].to(device), batch["attention_mask"].to(device)


def sequences(input_ids: Tensor, attention_mask: Tensor, answers: Answers) -> tuple[Tensor, Tensor]:
    return torch.cat([input_ids, answers.tokens], 1), torch.cat([attention_mask, answers.mask], 1)


def decode(tokenizer, answers: Answers) -> list[str]:
    """Texts without the end token."""
    return [
        tokenizer.decode(row[mask.bool()].tolist(), skip_special_tokens=True).strip()
        for row, mask in zip(answers.tokens.cpu(), answers.mask.cpu(), strict=True)
    ]


class Sampler:
    """Makes rollouts: generation first for all rows, then scoring, each a phase of its own."""

    def __init__(self, config: Config, run: Run, roles: Roles):
        self.run, self.roles, self.stage = run, roles, run.stage
        self.sampling = sampling_of(config, run.stage, run.tokenizer)
        self.seed = config.seed

    def generate(
        self, prompts: Sequence[data.Prompt], rows: Sequence[int], step: int
    ) -> list[tuple[Tensor, Tensor, Answers]]:
        """Answers in parts of rollout_micro_batch rows: (prompt ids, prompt mask, answers) each."""
        run, size = self.run, self.stage.rollout_micro_batch or len(prompts)
        parts = []
        with run.monitor.phase("generate", "actor"), self.roles.actor.generating() as sharded:
            for at in range(0, len(prompts), size):
                ids, mask = prompt_batch(prompts[at : at + size], run.tokenizer.pad_token_id, run.device)
                noise = uniforms(self.seed, step, rows[at : at + size], self.sampling.max_new_tokens, run.device)
                try:
                    answers = generate(self.roles.actor.module, ids, mask, noise, self.sampling, sharded)
                except NonFiniteLogitsError as error:
                    prompt = prompts[at + error.row].text[:200]
                    raise RuntimeError(f"{error}, in step {step + 1}, of the prompt {prompt!r}") from error
                parts.append((ids, mask, answers))
        return parts

    @torch.no_grad()
    def rollout(self, prompts: Sequence[data.Prompt], rows: Sequence[int], step: int) -> Rollout:
        parts = self.generate(prompts, rows, step)
        whole = _join(parts, self.run.tokenizer.pad_token_id)
        answers = [text for _, _, part in parts for text in decode(self.run.tokenizer, part)]
        texts = [prompt.text for prompt in prompts]
        size = self.stage.rollout_micro_batch or len(prompts)
        start = whole["input_ids"].shape[1] - whole["mask"].shape[1]

        def by_part(role: str, resident, score: Callable[[dict[str, Tensor], slice], Tensor]) -> Tensor:
            with self.run.monitor.phase("score", role), resident:
                slices = [slice(at, at + size) for at in range(0, len(prompts), size)]
                return torch.cat([score({k: v[s] for k, v in whole.items()}, s) for s in slices])

        def policy(model, entropy: bool):
            def score(part: dict[str, Tensor], _: slice) -> Tensor:
                log_probs, entropies = model(
                    input_ids=part["input_ids"],
                    attention_mask=part["attention_mask"],
                    answer_start=start,
                    temperature=self.stage.temperature,
                    with_entropy=entropy,
                )
                return torch.stack([log_probs, entropies if entropy else log_probs], 1)

            return score

        def reward(part: dict[str, Tensor], rows: slice) -> Tensor:
            return self.roles.reward(texts[rows], answers[rows], part["input_ids"], part["attention_mask"])

        def values(part: dict[str, Tensor], _: slice) -> Tensor:
            return answer_values(self.roles.critic, part["input_ids"], part["attention_mask"], start)

        own = by_part("actor", nullcontext(), policy(self.roles.actor, entropy=True))
        reference = by_part("reference", self.roles.reference.resident(), policy(self.roles.reference, entropy=False))
        return Rollout(
            **whole,
            log_probs=own[:, 0],
            entropy=own[:, 1],
            reference=reference[:, 0],
            values=by_part("critic", nullcontext(), values),
            scores=by_part("reward", self.roles.reward.resident(), reward),
            prompts=texts,
            answers=answers,
            rows=list(rows),
        )


def answer_values(critic, input_ids: Tensor, attention_mask: Tensor, start: int) -> Tensor:
    """The critic's value before each answer token: read one column earlier, like the log-prob. (rows, answer
    tokens)."""
    return critic(input_ids=input_ids, attention_mask=attention_mask)[:, start - 1 : -1]


def _join(parts: list[tuple[Tensor, Tensor, Answers]], pad_id: int) -> dict[str, Tensor]:
    """All parts in one batch: prompts widened on the left, answers on the right."""
    prompt_width = max(ids.shape[1] for ids, _, _ in parts)
    answer_width = max(answers.tokens.shape[1] for _, _, answers in parts)

    def left(x: Tensor, value: int) -> Tensor:
        return functional.pad(x, (prompt_width - x.shape[1], 0), value=value)

    def right(x: Tensor, value: int) -> Tensor:
        return functional.pad(x, (0, answer_width - x.shape[1]), value=value)

    mask = torch.cat([right(a.mask, 0) for _, _, a in parts])
    tokens = torch.cat([right(a.tokens, pad_id) for _, _, a in parts])
    prompt_ids = torch.cat([left(ids, pad_id) for ids, _, _ in parts])
    prompt_mask = torch.cat([left(m, 0) for _, m, _ in parts])
    return {
        "input_ids": torch.cat([prompt_ids, tokens], 1),
        "attention_mask": torch.cat([prompt_mask, mask], 1),
        "mask": mask,
        "truncated": torch.cat([a.truncated for _, _, a in parts]),
        "sampled": torch.cat([right(a.log_probs, 0) for _, _, a in parts]),
    }
