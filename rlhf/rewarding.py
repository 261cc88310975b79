"""Where PPO's scores come from: a reward model, or a Python function of the texts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from rlhf.config import RewardConfig
from rlhf.frameworks import Frozen
from rlhf.losses import normalise_scores
from rlhf.models.heads import score_at_last_token


class Reward(Protocol):
    def __call__(
        self, prompts: Sequence[str], answers: Sequence[str], input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        """One fp32 score per row, (batch,), on the device of `input_ids`."""
        ...

    def resident(self) -> AbstractContextManager[None]: ...


class ModelReward:
    """Scores of a reward model at the last real token, z-scored with the statistics saved beside it if there are any
    (C10)."""

    def __init__(self, model: Frozen, statistics: dict[str, float] | None):
        self.model = model
        self.mean, self.std = (statistics["mean"], statistics["std"]) if statistics else (0.0, 1.0)

    def __call__(
        self, prompts: Sequence[str], answers: Sequence[str], input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        scores = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return normalise_scores(score_at_last_token(scores, attention_mask), self.mean, self.std, clamp=None)

    def resident(self) -> AbstractContextManager[None]:
        return self.model.resident()


class FunctionReward:
    """A user's `f(prompts, answers) -> scores`; what it returns is checked, since a NaN here would only surface in
    the weights."""

    def __init__(self, dotted: str):
        module, _, name = dotted.rpartition(".")
        self.dotted = dotted
        self.function: Callable[[list[str], list[str]], Sequence[float]] = getattr(
            importlib.import_module(module), name
        )

    def __call__(
        self, prompts: Sequence[str], answers: Sequence[str], input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor:
        scores = [float(score) for score in self.function(list(prompts), list(answers))]
        if len(scores) != len(answers):
            raise ValueError(
                f"{self.dotted} returned {len(scores)} scores for {len(answers)} answers; one per answer is needed"
            )
        for score, prompt in zip(scores, prompts, strict=True):
            if not math.isfinite(score):
                raise ValueError(
                    f"{self.dotted} returned {score} for the prompt {prompt[:80]!r}; a finite number is needed"
                )
        return torch.tensor(scores, dtype=torch.float32, device=input_ids.device)

    def resident(self) -> AbstractContextManager[None]:
        return nullcontext()


def clamp_scores(scores: Tensor, config: RewardConfig) -> Tensor:
    return scores if config.clamp is None else scores.clamp(-config.clamp, config.clamp)
