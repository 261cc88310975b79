"""All the arithmetic of sft, rm and ppo, as pure functions of tensors: no models, no collectives, no state but
the KL coefficient.

Shapes: B rows, A answer tokens, H hidden, V vocabulary. A `mask` is (B, A), 1 at real tokens, bool or int. What stands
under a 0 is never read, not even a NaN, so padding with more columns or rows changes nothing. The maths is fp32
whatever comes in; sums over ranks and micro-batches are the caller's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# The largest block of fp32 logits alive at once: big enough to keep a GPU's matrix units busy, small beside any model.
LOGITS_BYTES = 64 * 2**20


class Total(NamedTuple):
    """Sums, so that adding micro-batches and ranks and then dividing once gives the mean over all items.

    `total` is the scalar to differentiate; `metrics` are detached sums over the same items.
    """

    total: Tensor
    metrics: dict[str, Tensor]


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Scalar fp32 sum of x where the mask is 1."""
    return torch.where(mask.bool(), x.float(), 0.0).sum()


# --- log-probs --------------------------------------------------------------------------------------------------------


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` (B, A) under softmax((hidden @ weight.T + bias) / temperature), and the entropy in nats.

    hidden (B, A, H) stands one column before its target; weight (V, H), bias (V). Both results are fp32 (B, A).
    Logits exist for `chunk_tokens` tokens at a time and are computed again in backward (A09); by default a chunk's fp32
    logits take at most LOGITS_BYTES. A weight that is sharded must be whole here and again while backward runs.
    """
    if chunk_tokens is None:
        chunk_tokens = max(1, LOGITS_BYTES // (4 * weight.shape[0]))
    rows, picks = hidden.reshape(-1, hidden.shape[-1]).split(chunk_tokens), targets.reshape(-1).split(chunk_tokens)
    # Nothing random inside, so no RNG state to keep. Without grad, checkpoint is a plain call.
    recompute = partial(checkpoint, _chunk_log_probs, use_reentrant=False, preserve_rng_state=False)
    pieces = [recompute(*chunk, weight, bias, temperature, with_entropy) for chunk in zip(rows, picks, strict=True)]
    log_probs = torch.cat([piece[0] for piece in pieces]).view(targets.shape)
    entropy = torch.cat([piece[1] for piece in pieces]).view(targets.shape) if with_entropy else None
    return log_probs, entropy


def _chunk_log_probs(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits = functional.linear(hidden, weight, bias).float() / temperature
    normaliser = logits.logsumexp(-1, keepdim=True)
    log_probs = (logits.gather(-1, targets[:, None]) - normaliser).squeeze(-1)
    if not with_entropy:
        return log_probs, None
    # From log-probs and not from logits: these have an arbitrary offset, which would cost digits.
    distribution = logits - normaliser
    return log_probs, -(distribution.exp() * distribution).sum(-1)


# --- sft and rm -------------------------------------------------------------------------------------------------------


def sft_loss(log_probs: Tensor, mask: Tensor) -> Total:
    """Minus the sum of the answers' log-probs, in nats; the weight is the number of answer tokens."""
    return Total(-masked_sum(log_probs, mask), {})


def pairwise_loss(chosen: Tensor, rejected: Tensor) -> Total:
    """Bradley-Terry: sum over pairs of -log sigmoid(chosen - rejected), scores (B). A tie counts as wrong.

    Ouyang et al. 2022 (arXiv 2203.02155), equation 1. Weight: the number of pairs.
    """
    chosen, rejected = chosen.float(), rejected.float()
    margin = chosen - rejected
    metrics = {
        "accuracy": (margin > 0).float().sum(),
        "margin": margin.detach().sum(),
        "reward/chosen": chosen.detach().sum(),
        "reward/rejected": rejected.detach().sum(),
    }
    return Total(-functional.logsigmoid(margin).sum(), metrics)


# --- rewards and advantages -------------------------------------------------------------------------------------------


def kl_signed(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's samples; unbiased, though not token by
    token.

    k1 of J. Schulman, "Approximating KL divergence", 2020. Elementwise.
    """
    return log_probs.float() - reference.float()


def kl_nonnegative(log_probs: Tensor, reference: Tensor) -> Tensor:
    """k3 of the same note: also unbiased, with less variance and never below 0.

    Its mean and k1's agree when sampling and scoring do; a negative mean of k1 beside it says that they do not (A33).
    """
    log_ratio = reference.float() - log_probs.float()
    # expm1 keeps the digits near 0 that exp(x) - 1 loses; the clamp takes its last rounding error.
    return (log_ratio.expm1() - log_ratio).clamp(min=0)


def normalise_scores(scores: Tensor, mean: float, std: float, clamp: float | None) -> Tensor:
    """(scores - mean) / std, then cut to [-clamp, clamp]. ValueError when std is not above 0."""
    if not std > 0:
        raise ValueError(
            f"The reward model's standard deviation over its training set is {std}: its scores cannot be normalised. "
            "It gives every answer the same score: train it longer, or write reward.normalise=false."
        )
    scores = (scores.float() - mean) / std
    return scores if clamp is None else scores.clamp(-clamp, clamp)


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """(B, A): -coefficient * kl at each answer token, plus the row's score (B) at its last one, found by the mask
    (A37).

    A row without answer tokens gets zeros. Ziegler et al. 2019 (arXiv 1909.08593), equation 2.
    """
    real = mask.bool()
    tokens_left = real.long().flip(-1).cumsum(-1).flip(-1)  # counting the token itself
    is_last = real & (tokens_left == 1)
    return torch.where(real, -coefficient * kl.float(), 0.0) + torch.where(is_last, scores.float()[:, None], 0.0)


def advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation and the returns advantages + values, both (B, A), 0 at padding.

    Schulman et al. 2015 (arXiv 1506.02438), equations 11 and 12. The episode ends with the row's last real token, so
    the value after it is 0. values[:, t] is the critic's view before token t is chosen. The mask's ones stand in one
    run.
    """
    real = mask.bool()
    rewards = torch.where(real, rewards.float(), 0.0)
    values = torch.where(real, values.float(), 0.0)
    result = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(real[:, t], delta + gamma * lam * next_advantage, 0.0)
        next_value = values[:, t]
        result[:, t] = next_advantage
    return result, result + values


# --- moments that can be added over ranks -----------------------------------------------------------------------------


class Moments(NamedTuple):
    """Sums over entries: add those of all ranks field by field, then ask for mean and variance (0 without entries)."""

    sum: Tensor | float
    sum_of_squares: Tensor | float
    entries: Tensor | float

    @property
    def mean(self) -> float:
        return float(self.sum) / max(float(self.entries), 1.0)

    @property
    def variance(self) -> float:
        """Of the population: divided by the number of entries. Never below 0."""
        return max(float(self.sum_of_squares) / max(float(self.entries), 1.0) - self.mean**2, 0.0)


def masked_moments(x: Tensor, mask: Tensor) -> Moments:
    """In fp64: a mean far from 0 would leave no digits of an fp32 variance."""
    x = torch.where(mask.bool(), x.double(), 0.0)
    return Moments(x.sum(), x.square().sum(), mask.bool().sum().double())


def whiten(advantages: Tensor, mask: Tensor, mean: float | Tensor, variance: float | Tensor) -> Tensor:
    """(B, A) with mean 0 and deviation 1 over the entries that the moments were taken of; 0 at padding."""
    deviation = torch.as_tensor(variance + 1e-8, dtype=torch.float32, device=advantages.device).sqrt()
    return torch.where(mask.bool(), (advantages.float() - mean) / deviation, 0.0)


def explained_variance(residuals: Moments, returns: Moments) -> float:
    """1 - Var(returns - values) / Var(returns), `residuals` being the moments of returns - values; 1 is perfect.

    NaN when the returns do not vary: nothing is there to be explained.
    """
    return 1.0 - residuals.variance / returns.variance if returns.variance > 0 else math.nan


# --- ppo losses -------------------------------------------------------------------------------------------------------


def policy_loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip_ratio: float) -> Total:
    """PPO's clipped surrogate, summed over answer tokens; all inputs (B, A), `old` the log-probs at sampling time.

    Schulman et al. 2017 (arXiv 1707.06347), equation 7. Metrics: `clip/fraction` counts the tokens whose gradient the
    clip cuts off, `kl/update` estimates KL(old || new) with k3. Weight: the number of answer tokens.
    """
    ratio = _ratio(log_probs, old, mask)
    advantages = advantages.float()
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    with torch.no_grad():
        metrics = {
            "ratio/mean": masked_sum(ratio, mask),
            "clip/fraction": masked_sum(clipped > free, mask),
            "kl/update": masked_sum(kl_nonnegative(old, log_probs), mask),
        }
    return Total(masked_sum(torch.maximum(free, clipped), mask), metrics)


def ratio_max(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """The largest new / old probability of an answer token, detached, scalar: a maximum cannot be summed. 0 if none."""
    ratio = torch.where(mask.bool(), _ratio(log_probs, old, mask), 0.0).detach()
    return ratio.max() if ratio.numel() else ratio.new_zeros(())


def _ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    # Padding is set to a ratio of 1 before exp: an overflow there would come back as a NaN gradient.
    return torch.where(mask.bool(), log_probs.float() - old.float(), 0.0).exp()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_value: float | None) -> Total:
    """Half the squared error, summed over answer tokens; all inputs (B, A).

    With `clip_value`, in the units of the values, a value that moved further than that from `old_values` is charged
    as if it had stopped there, where that costs more (the practice of PPO's authors; it is not in their paper).
    """
    # Padding is set to 0 before squaring: what stands there would come back as a gradient.
    values, old_values, returns = (torch.where(mask.bool(), x.float(), 0.0) for x in (values, old_values, returns))
    error = (values - returns).square()
    worst = error
    if clip_value is not None:
        near = old_values + (values - old_values).clamp(-clip_value, clip_value)
        worst = torch.maximum(error, (near - returns).square())
    metrics = {
        "value/mean": masked_sum(values.detach(), mask),
        "return/mean": masked_sum(returns, mask),
        "value/clip_fraction": masked_sum(worst.detach() > error.detach(), mask),
    }
    return Total(0.5 * masked_sum(worst, mask), metrics)


# --- the KL penalty's coefficient -------------------------------------------------------------------------------------


class FixedKl:
    """A constant coefficient. It stays the configured one on resume."""

    def __init__(self, coefficient: float):
        self.coefficient = coefficient

    def update(self, kl_mean: float, answers: int) -> None:
        pass

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        pass


class AdaptiveKl:
    """Steers the mean KL per answer, in nats, towards `target`: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    The error, in proportion to the target, is cut to +-0.2; `horizon` is the number of answers after which a constant
    error has been applied once in full.
    """

    def __init__(self, coefficient: float, target: float, horizon: int):
        self.coefficient = coefficient
        self.target = target
        self.horizon = horizon

    def update(self, kl_mean: float, answers: int) -> None:
        """`kl_mean` over the rollout's `answers` answers of all ranks. ValueError when it is not a number."""
        if not math.isfinite(kl_mean):
            raise ValueError(
                f"The mean KL per answer is {kl_mean}: the log-probs of the actor or the reference broke down."
            )
        error = min(max(kl_mean / self.target - 1.0, -0.2), 0.2)
        # At most one horizon per rollout: more than five at once would make the coefficient negative.
        self.coefficient *= 1.0 + error * min(answers / self.horizon, 1.0)

    def state(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
