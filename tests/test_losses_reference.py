"""GAE and the PPO losses against a plain version: Python floats, one token after the other, straight from the
papers."""

import math
import random

import pytest
import torch
from torch import Tensor

from rlhf import losses

CASES = 60
Rows = list[list[float]]  # the real tokens of each row, without padding


def plain_advantages(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 11 of arXiv 1506.02438 as it stands: a sum over all later errors, without recursion."""
    end = len(rewards)
    errors = [rewards[t] + gamma * (values[t + 1] if t + 1 < end else 0.0) - values[t] for t in range(end)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, end)) for t in range(end)]


def plain_rewards(score: float, kl: list[float], coefficient: float) -> list[float]:
    return [-coefficient * kl[t] + (score if t == len(kl) - 1 else 0.0) for t in range(len(kl))]


def plain_policy_loss(new: float, old: float, advantage: float, clip: float) -> tuple[float, float, bool]:
    """Loss of one token, its derivative by `new`, and whether the clip cut it."""
    ratio = math.exp(new) / math.exp(old)
    if advantage >= 0 and ratio > 1 + clip:
        return -(1 + clip) * advantage, 0.0, True
    if advantage < 0 and ratio < 1 - clip:
        return -(1 - clip) * advantage, 0.0, True
    return -ratio * advantage, -ratio * advantage, False


def plain_value_loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """Loss of one token and its derivative by `value`."""
    free = 0.5 * (value - target) ** 2
    if clip is not None and abs(value - old) > clip:
        stopped = 0.5 * (old + math.copysign(clip, value - old) - target) ** 2
        if stopped > free:
            return stopped, 0.0
    return free, value - target


def random_rows(generator: random.Random, lengths: list[int], spread: float) -> Rows:
    return [[generator.gauss(0.0, spread) for _ in range(length)] for length in lengths]


def pad(rows: Rows, width: int, fill: float) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows])


def flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]


class Case:
    """1 to 4 rows of 0 to 7 tokens (at least one token in all), padded with rubbish."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        lengths = [self.random.randint(0, 7) for _ in range(self.random.randint(1, 4))]
        self.lengths = lengths if any(lengths) else [1]
        self.width = max(self.lengths) + self.random.randint(0, 2)
        self.mask = pad([[1.0] * length for length in self.lengths], self.width, 0.0).long()

    def rows(self, spread: float = 1.0) -> tuple[Rows, Tensor]:
        rows = random_rows(self.random, self.lengths, spread)
        return rows, pad(rows, self.width, self.random.choice([0.0, 1e9, math.nan]))

    def real(self, x: Tensor) -> list[float]:
        """The real entries of x, after a look that the others are 0."""
        assert x[self.mask == 0].abs().sum().item() == 0.0
        return x[self.mask == 1].tolist()


@pytest.mark.parametrize("seed", range(CASES))
def test_rewards_and_advantages(seed: int):
    case = Case(seed)
    gamma, lam, coefficient = case.random.choice([1.0, 0.9]), case.random.random(), case.random.random()
    scores = [case.random.gauss(0.0, 2.0) for _ in case.lengths]
    (kl, kl_padded), (values, values_padded) = case.rows(), case.rows()
    rewards = [plain_rewards(score, row, coefficient) for score, row in zip(scores, kl, strict=True)]
    expected = [plain_advantages(r, v, gamma, lam) for r, v in zip(rewards, values, strict=True)]

    rewards_padded = losses.token_rewards(torch.tensor(scores), kl_padded, case.mask, coefficient)
    result, returns = losses.advantages(rewards_padded, values_padded, case.mask, gamma, lam)
    assert case.real(rewards_padded) == pytest.approx(flat(rewards), abs=1e-5)
    assert case.real(result) == pytest.approx(flat(expected), abs=1e-5)
    sums = [a + v for a, v in zip(flat(expected), flat(values), strict=True)]
    assert case.real(returns) == pytest.approx(sums, abs=1e-5)

    n = len(flat(expected))
    mean = sum(flat(expected)) / n
    variance = sum((a - mean) ** 2 for a in flat(expected)) / n
    moments = losses.masked_moments(result, case.mask)
    assert (moments.mean, moments.variance) == pytest.approx((mean, variance), abs=1e-5)
    if n > 1:  # one token whitens to 0 / 0
        whitened = losses.whiten(result, case.mask, moments.mean, moments.variance)
        wanted = [(a - mean) / math.sqrt(variance) for a in flat(expected)]
        assert case.real(whitened) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("seed", range(CASES))
def test_policy_loss(seed: int):
    case = Case(seed)
    (new, new_padded), (old, old_padded), (advantages, advantages_padded) = case.rows(0.3), case.rows(0.3), case.rows()
    tokens = list(zip(flat(new), flat(old), flat(advantages), strict=True))
    plain = [plain_policy_loss(*token, 0.2) for token in tokens]

    new_padded.requires_grad_()
    total, metrics = losses.policy_loss(new_padded, old_padded, advantages_padded, case.mask, 0.2)
    total.backward()
    assert new_padded.grad is not None
    assert total.item() == pytest.approx(sum(loss for loss, _, _ in plain), abs=1e-4)
    assert case.real(new_padded.grad) == pytest.approx([slope for _, slope, _ in plain], abs=1e-5)
    ratios = [math.exp(n - o) for n, o, _ in tokens]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "ratio/mean": sum(ratios),
            "clip/fraction": sum(cut for _, _, cut in plain),
            "kl/update": sum(r - 1 - math.log(r) for r in ratios),
        },
        abs=1e-4,
    )
    assert losses.ratio_max(new_padded, old_padded, case.mask).item() == pytest.approx(max(ratios), abs=1e-5)


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize("seed", range(CASES))
def test_value_loss(seed: int, clip: float | None):
    case = Case(seed)
    (values, values_padded), (old, old_padded), (targets, targets_padded) = case.rows(), case.rows(), case.rows()
    plain = [plain_value_loss(*token, clip) for token in zip(flat(values), flat(old), flat(targets), strict=True)]

    values_padded.requires_grad_()
    total, metrics = losses.value_loss(values_padded, old_padded, targets_padded, case.mask, clip)
    total.backward()
    assert values_padded.grad is not None
    assert total.item() == pytest.approx(sum(loss for loss, _ in plain), abs=1e-4)
    assert case.real(values_padded.grad) == pytest.approx([slope for _, slope in plain], abs=1e-5)
    assert metrics["value/mean"].item() == pytest.approx(sum(flat(values)), abs=1e-5)
    assert metrics["return/mean"].item() == pytest.approx(sum(flat(targets)), abs=1e-5)


def test_the_cases_reach_what_they_should():
    """Among the seeds: empty rows, rows that fill the width, tokens cut by either side of the clip."""
    cases = [Case(seed) for seed in range(CASES)]
    assert sum(0 in case.lengths for case in cases) >= 10
    assert sum(case.width in case.lengths for case in cases) >= 10
    cut_high = cut_low = 0
    for case in cases:
        rows = [flat(case.rows(spread)[0]) for spread in (0.3, 0.3, 1.0)]
        for new, old, advantage in zip(*rows, strict=True):
            cut = plain_policy_loss(new, old, advantage, 0.2)[2]
            cut_high += cut and advantage >= 0
            cut_low += cut and advantage < 0
    assert cut_high >= 10 and cut_low >= 10
