"""Cases of about five tokens worked out by hand in the comments (A36), and fp64 versions for the log-probs."""

import json
import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf import losses

NAN = math.nan
LN2 = math.log(2)


def tensor(*rows: list[float]) -> Tensor:
    """(rows, columns), also of a single row."""
    return torch.tensor(rows)


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_token_log_probs_by_hand():
    # hidden (1, 0) picks the first column of the weight, whose softmax is (1/2, 1/4, 1/4); (0, 1) gives (1/8, 1/8,
    # 3/4).
    weight = torch.tensor([[1 / 2, 1 / 8], [1 / 4, 1 / 8], [1 / 4, 3 / 4]]).log()
    hidden = tensor([1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0])[None]
    targets = torch.tensor([[0, 1, 1, 2, 2]])
    log_probs, entropy = losses.token_log_probs(hidden, weight, None, targets, with_entropy=True)
    assert_close(log_probs.exp(), tensor([1 / 2, 1 / 4, 1 / 8, 3 / 4, 1 / 4]))
    # Entropies: 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2, and 2 * 1/8 ln 8 + 3/4 ln 4/3 = 0.75 ln 2 + 0.75 ln 4/3.
    first, second = 1.5 * LN2, 0.75 * LN2 + 0.75 * math.log(4 / 3)
    assert_close(entropy, tensor([first, first, second, second, first]))


def test_temperature_by_hand():
    # Logits ln(1, 4, 16) at temperature 2 are ln(1, 2, 4): probabilities 1/7, 2/7, 4/7. The bias is part of the logits.
    bias = torch.tensor([1.0, 4.0, 16.0]).log()
    hidden, weight = torch.zeros(1, 3, 2), torch.ones(3, 2)
    log_probs, entropy = losses.token_log_probs(hidden, weight, bias, torch.tensor([[0, 1, 2]]), temperature=2.0)
    assert_close(log_probs.exp(), tensor([1 / 7, 2 / 7, 4 / 7]))
    assert entropy is None


def random_logit_case(dtype: torch.dtype = torch.float32):
    """B 3, A 7, H 8, V 50: 21 tokens, with inputs that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 7, 8, generator=generator).to(dtype)
    weight = torch.randn(50, 8, generator=generator).to(dtype)
    bias = torch.randn(50, generator=generator).to(dtype)
    targets = torch.randint(50, (3, 7), generator=generator)
    grads = torch.randn(2, 3, 7, generator=generator)
    return (hidden, weight, bias), targets, grads


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4, 7, 20, 21, 1000])  # 4 and 20 do not divide 21
def test_token_log_probs_equal_log_softmax_in_fp64(chunk_tokens: int | None, with_bias: bool):
    inputs, targets, (grad_log_probs, grad_entropy) = random_logit_case()
    inputs = inputs if with_bias else inputs[:2]
    ours = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]

    hidden, weight, bias = ours if with_bias else [*ours, None]
    log_probs, entropy = losses.token_log_probs(hidden, weight, bias, targets, 0.7, chunk_tokens, with_entropy=True)
    assert entropy is not None
    distribution = (torch.nn.functional.linear(*exact) / 0.7).log_softmax(-1)
    exact_log_probs = distribution.gather(-1, targets[..., None]).squeeze(-1)
    exact_entropy = -(distribution.exp() * distribution).sum(-1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert_close(log_probs.double(), exact_log_probs, rtol=0, atol=1e-5)
    assert_close(entropy.double(), exact_entropy, rtol=0, atol=1e-5)

    (log_probs * grad_log_probs + entropy * grad_entropy).sum().backward()
    (exact_log_probs * grad_log_probs + exact_entropy * grad_entropy).sum().backward()
    for ours_input, exact_input in zip(ours, exact, strict=True):
        assert ours_input.grad is not None and exact_input.grad is not None
        assert_close(ours_input.grad.double(), exact_input.grad, rtol=1e-5, atol=1e-5)


def test_low_precision_logits_are_normalised_in_fp32():
    inputs, targets, _ = random_logit_case(torch.bfloat16)
    log_probs, _ = losses.token_log_probs(*inputs, targets)
    logits = torch.nn.functional.linear(*inputs)
    exact = logits.double().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    assert log_probs.dtype == torch.float32
    # The matmul's rounding to bf16 is in both; a softmax in bf16 would be off by about 0.01.
    assert_close(log_probs.double(), exact, rtol=0, atol=1e-5)


def test_frozen_weight_gets_no_gradient_and_hidden_does():
    (hidden, weight, bias), targets, _ = random_logit_case()
    hidden.requires_grad_()
    losses.token_log_probs(hidden, weight, bias, targets, chunk_tokens=4)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.no_grad():
        assert not losses.token_log_probs(hidden, weight, bias, targets, chunk_tokens=4)[0].requires_grad


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returned, in forward and backward."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


def largest_tensors(chunk_tokens: int | None) -> tuple[int, int]:
    """Largest number of elements created, and saved for backward, over 2 x 20 tokens with H 4 and V 100."""
    hidden = torch.randn(2, 20, 4, requires_grad=True)
    weight = torch.randn(100, 4, requires_grad=True)
    saved = [0]

    def pack(x: Tensor) -> Tensor:
        saved.append(x.numel())
        return x

    with LargestTensor() as created, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        log_probs, entropy = losses.token_log_probs(
            hidden, weight, None, torch.zeros(2, 20, dtype=torch.long), 0.7, chunk_tokens, with_entropy=True
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    return created.elements, max(saved)


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch):
    # 40 tokens x 100 words = 4000 logits in all; a chunk of 8 tokens has 800, the weight and its gradient have 400.
    assert largest_tensors(chunk_tokens=40)[0] == 4000
    created, saved = largest_tensors(chunk_tokens=8)
    assert created == 800
    assert saved <= 400  # no chunk keeps its logits until backward
    # The default fills LOGITS_BYTES: 2400 bytes are 600 logits in fp32, six tokens.
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2400)
    assert largest_tensors(chunk_tokens=None)[0] == 600
    # A vocabulary larger than the limit still goes through, one token at a time.
    monkeypatch.setattr(losses, "LOGITS_BYTES", 4)
    assert largest_tensors(chunk_tokens=None)[0] == 400


# --- sft and rm -------------------------------------------------------------------------------------------------------


def test_sft_loss_by_hand():
    log_probs = tensor([-0.5, -1.0, -2.0, NAN, -4.0], [-0.25, NAN, NAN, NAN, NAN])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    # 0.5 + 1 + 2 + 0.25
    total, metrics = losses.sft_loss(log_probs, mask)
    assert total.item() == 3.75
    assert metrics == {}


def test_pairwise_loss_by_hand():
    # Margins 2, 0, -2: ln(1 + e^-2) + ln 2 + ln(1 + e^2) = 0.126928 + 0.693147 + 2.126928. One of three is right.
    total, metrics = losses.pairwise_loss(torch.tensor([2.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 1.0]))
    assert total.item() == pytest.approx(2.947003, abs=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == {
        "accuracy": 1.0,
        "margin": 0.0,
        "reward/chosen": 1.0,
        "reward/rejected": 1.0,
    }


def test_pairwise_loss_is_fp32_and_finite_far_out():
    chosen = torch.tensor([-1000.0], dtype=torch.bfloat16, requires_grad=True)
    total, metrics = losses.pairwise_loss(chosen, torch.zeros(1, dtype=torch.bfloat16))
    total.backward()
    assert total.dtype == torch.float32
    assert total.item() == 1000.0
    assert chosen.grad is not None and chosen.grad.item() == -1.0
    assert not any(value.requires_grad for value in metrics.values())
    # 256 + 1 does not exist in bf16: a margin taken there would be 0.
    wide, narrow = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([-1.0], dtype=torch.bfloat16)
    assert losses.pairwise_loss(wide, narrow).metrics["margin"].item() == 257.0


# --- rewards and advantages -------------------------------------------------------------------------------------------


def test_kl_estimators_by_hand():
    # Reference / policy = 1, 2, 1/2: k1 = 0, -ln 2, ln 2; k3 = r - 1 - ln r = 0, 1 - ln 2, ln 2 - 1/2.
    log_probs, reference = tensor([-1.0, -2.0, -2.0]), tensor([-1.0, -2.0 + LN2, -2.0 - LN2])
    assert_close(losses.kl_signed(log_probs, reference), tensor([0.0, -LN2, LN2]))
    assert_close(losses.kl_nonnegative(log_probs, reference), tensor([0.0, 1 - LN2, LN2 - 0.5]))


def test_both_kl_estimators_have_the_kl_as_their_mean():
    # Policy (1/2, 1/4, 1/4), reference (1/4, 1/4, 1/2): KL = 1/2 ln 2 + 0 - 1/4 ln 2 = 1/4 ln 2.
    policy, reference = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    for estimator in (losses.kl_signed, losses.kl_nonnegative):
        assert (policy * estimator(policy.log(), reference.log())).sum().item() == pytest.approx(LN2 / 4, abs=1e-6)


def test_kl_nonnegative_never_goes_below_zero():
    log_ratio = torch.cat([torch.logspace(-12, 1, 20_000), -torch.logspace(-12, 1, 20_000)])
    assert losses.kl_nonnegative(torch.zeros_like(log_ratio), log_ratio).min().item() >= 0.0
    # Near 0 it is x^2 / 2 + x^3 / 6; in fp32, exp(x) - 1 - x would be wrong in the first digit here.
    small = losses.kl_nonnegative(torch.zeros(2), torch.tensor([1e-3, -1e-3])).double()
    assert_close(small, torch.tensor([0.5e-6 + 1e-9 / 6, 0.5e-6 - 1e-9 / 6], dtype=torch.float64), rtol=1e-3, atol=0.0)


def test_token_rewards_by_hand():
    kl = tensor([1.0, 2.0, 3.0, 4.0, 5.0]).repeat(5, 1)
    scores = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]])
    expected = tensor(
        [-0.5, -1.0, -1.5, -2.0, 7.5],  # -2.5 + 10
        [-0.5, -1.0, 18.5, 0.0, 0.0],  # -1.5 + 20
        [29.5, 0.0, 0.0, 0.0, 0.0],  # -0.5 + 30
        [0.0, 0.0, 0.0, 0.0, 0.0],  # no answer, no place for the score
        [0.0, -1.0, 0.0, 48.0, 0.0],  # -2 + 50, once
    )
    assert torch.equal(losses.token_rewards(scores, kl, mask, 0.5), expected)
    assert torch.equal(losses.token_rewards(scores, kl, mask.bool(), 0.5), expected)


def test_advantages_by_hand():
    rewards = tensor([0.0, 0.0, 0.0, 1.0, NAN], [2.0] + [7.0] * 4, [7.0] * 5, [7.0, 7.0, 0.0, 1.0, 7.0])
    values = tensor([1.0, 2.0, 4.0, 8.0, NAN], [1.0] + [9.0] * 4, [9.0] * 5, [9.0, 9.0, 4.0, 8.0, 9.0])
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 0]])
    # gamma 1/2, lambda 1/2, so each advantage is delta + 1/4 of the next one.
    # Row 0: deltas 0 + 2/2 - 1 = 0; 0 + 4/2 - 2 = 0; 0 + 8/2 - 4 = 0; 1 + 0 - 8 = -7 (the value after the end is 0).
    #        advantages from the right: -7; -7/4; -7/16; -7/64.
    # Row 1: 2 + 0 - 1 = 1. Row 2: no answer. Row 3: the end of row 0, with padding on both sides.
    result, returns = losses.advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    expected = tensor(
        [-7 / 64, -7 / 16, -7 / 4, -7.0, 0.0], [1.0] + [0.0] * 4, [0.0] * 5, [0.0, 0.0, -7 / 4, -7.0, 0.0]
    )
    assert torch.equal(result, expected)
    # Returns are advantage + value.
    expected = tensor([57 / 64, 25 / 16, 9 / 4, 1.0, 0.0], [2.0] + [0.0] * 4, [0.0] * 5, [0.0, 0.0, 9 / 4, 1.0, 0.0])
    assert torch.equal(returns, expected)


def test_advantages_at_the_ends_of_lambda():
    rewards, values = tensor([1.0, 0.0, -2.0, 0.0, 4.0]), tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    mask = torch.ones(1, 5)
    # lambda 1: the return is the sum of the rewards to come: 3, 2, 2, 4, 4.
    assert torch.equal(losses.advantages(rewards, values, mask, 1.0, 1.0)[1], tensor([3.0, 2.0, 2.0, 4.0, 4.0]))
    # lambda 0: the advantage is the one-step error: 1+2-1, 0+3-2, -2+4-3, 0+5-4, 4+0-5.
    assert torch.equal(losses.advantages(rewards, values, mask, 1.0, 0.0)[0], tensor([2.0, 1.0, -1.0, 1.0, -1.0]))


def test_normalise_scores_by_hand():
    scores = torch.tensor([-30.0, -28.0, -26.0, 0.0])
    # (s + 28) / 2 = -1, 0, 1, 14; cut at 5.
    assert torch.equal(losses.normalise_scores(scores, -28.0, 2.0, 5.0), torch.tensor([-1.0, 0.0, 1.0, 5.0]))
    assert torch.equal(losses.normalise_scores(scores, -28.0, 2.0, None), torch.tensor([-1.0, 0.0, 1.0, 14.0]))
    for std in (0.0, NAN):
        with pytest.raises(ValueError, match=r"write reward\.normalise=false"):
            losses.normalise_scores(scores, 0.0, std, None)


# --- moments ----------------------------------------------------------------------------------------------------------


def test_moments_and_whitening_by_hand():
    x, mask = tensor([1.0, 3.0, 5.0, 7.0, NAN]), torch.tensor([[1, 1, 1, 1, 0]])
    # Sum 16, squares 1 + 9 + 25 + 49 = 84: mean 4, variance 84/4 - 16 = 5.
    moments = losses.masked_moments(x, mask)
    assert [float(field) for field in moments] == [16.0, 84.0, 4.0]
    assert (moments.mean, moments.variance) == (4.0, 5.0)
    whitened = losses.whiten(x, mask, moments.mean, moments.variance)
    assert_close(whitened, tensor([-3.0, -1.0, 1.0, 3.0, 0.0]) / math.sqrt(5))
    tensors = losses.whiten(x, mask, torch.tensor(moments.mean), torch.tensor(moments.variance))
    assert torch.equal(tensors, whitened)


def test_moments_of_two_ranks_add_up():
    torch.manual_seed(0)
    x, mask = torch.randn(4, 5) - 1000.0, torch.rand(4, 5) < 0.7
    halves = [losses.masked_moments(x[:1], mask[:1]), losses.masked_moments(x[1:], mask[1:])]
    added = losses.Moments(*(float(a + b) for a, b in zip(*halves, strict=True)))
    real = x[mask].double()
    assert added.mean == pytest.approx(real.mean().item(), abs=1e-9)
    # With sums in fp32 the variance, 1, would drown: 1000 squared has a spacing of 0.06.
    assert added.variance == pytest.approx(real.var(unbiased=False).item(), abs=1e-6)


def test_moments_of_nothing_are_zero():
    moments = losses.masked_moments(tensor([NAN, NAN]), torch.zeros(1, 2))
    assert (moments.mean, moments.variance) == (0.0, 0.0)
    assert torch.equal(losses.whiten(tensor([NAN, NAN]), torch.zeros(1, 2), 0.0, 0.0), torch.zeros(1, 2))


def test_explained_variance_by_hand():
    mask = torch.ones(1, 4)

    def explained(values: Tensor, returns: Tensor) -> float:
        return losses.explained_variance(
            losses.masked_moments(returns - values, mask), losses.masked_moments(returns, mask)
        )

    returns = tensor([1.0, 3.0, 5.0, 7.0])  # variance 5
    assert explained(tensor([0.0, 4.0, 4.0, 8.0]), returns) == pytest.approx(0.8)  # residuals 1, -1, 1, -1: 1 - 1/5
    assert explained(tensor([0.0, 2.0, 4.0, 6.0]), returns) == 1.0  # a constant offset varies with nothing
    assert explained(tensor([7.0, 5.0, 3.0, 1.0]), returns) == pytest.approx(-3.0)  # residuals -6, -2, 2, 6: 1 - 20/5
    assert math.isnan(explained(returns, torch.full((1, 4), 2.0)))


# --- ppo losses -------------------------------------------------------------------------------------------------------


def test_policy_loss_by_hand():
    old = tensor([-3.0, -3.0, -3.0, -3.0, NAN])
    log_probs = (old + torch.tensor([1.0, 2.0, 0.5, 0.5, 1.0]).log()).requires_grad_()
    advantages, mask = tensor([2.0, 1.0, 1.0, -1.0, NAN]), torch.tensor([[1, 1, 1, 1, 0]])
    total, metrics = losses.policy_loss(log_probs, old, advantages, mask, clip_ratio=0.2)
    # ratio 1,   A  2: -2 either way
    # ratio 2,   A  1: -min(2, 1.2) = -1.2, cut
    # ratio 1/2, A  1: -min(0.5, 0.8) = -0.5, outside the interval but not cut: the update must bring it back
    # ratio 1/2, A -1: -min(-0.5, -0.8) = 0.8, cut
    assert total.item() == pytest.approx(-2.9, abs=1e-6)
    # Gradient to the log-prob: -A * ratio where not cut.
    total.backward()
    assert_close(log_probs.grad, tensor([-2.0, 0.0, -0.5, 0.0, 0.0]))
    # Sums: ratios 1 + 2 + 1/2 + 1/2; two cut; r - 1 - ln r = 0, 1 - ln 2, twice ln 2 - 1/2, together ln 2.
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {"ratio/mean": 4.0, "clip/fraction": 2.0, "kl/update": LN2}, abs=1e-6
    )
    assert not any(value.requires_grad for value in metrics.values())
    assert losses.ratio_max(log_probs, old, mask).item() == pytest.approx(2.0)
    assert losses.ratio_max(log_probs, old, torch.zeros(1, 5)).item() == 0.0


def test_first_update_has_ratio_one_and_the_policy_gradient():
    log_probs = tensor([-1.0, -2.0, -3.0, -4.0, -5.0]).requires_grad_()
    advantages = tensor([1.0, -1.0, 0.5, 2.0, -0.25])
    total, metrics = losses.policy_loss(log_probs, log_probs.detach(), advantages, torch.ones(1, 5), 0.2)
    total.backward()
    assert log_probs.grad is not None and torch.equal(log_probs.grad, -advantages)
    assert metrics["clip/fraction"].item() == metrics["kl/update"].item() == 0.0


def test_value_loss_by_hand():
    old, returns = tensor([0.0, 0.0, 0.0, 0.0, NAN]), tensor([0.0, 2.0, 0.0, 0.5, NAN])
    mask = torch.tensor([[1, 1, 1, 1, 0]])

    def run(clip_value: float | None):
        values = tensor([0.1, 1.0, -1.0, 0.5, NAN]).requires_grad_()
        total, metrics = losses.value_loss(values, old, returns, mask, clip_value)
        total.backward()
        return total.item(), values.grad, {name: value.item() for name, value in metrics.items()}

    # Squared errors 0.01, 1, 1, 0, and stopped at +-0.2 of the old value: 0.01, 1.8^2 = 3.24, 0.04, 0.3^2 = 0.09.
    # The larger of each: 0.01 + 3.24 + 1 + 0.09 = 4.34, half of it 2.17. Where the stop was charged no gradient flows.
    total, grad, metrics = run(0.2)
    assert total == pytest.approx(2.17, abs=1e-6)
    assert_close(grad, tensor([0.1, 0.0, -1.0, 0.0, 0.0]))
    assert metrics == pytest.approx({"value/mean": 0.6, "return/mean": 2.5, "value/clip_fraction": 2.0}, abs=1e-6)
    # Without the clip: (0.01 + 1 + 1 + 0) / 2.
    total, grad, metrics = run(None)
    assert total == pytest.approx(1.005, abs=1e-6)
    assert_close(grad, tensor([0.1, -1.0, -1.0, 0.0, 0.0]))
    assert metrics["value/clip_fraction"] == 0.0


# --- padding ----------------------------------------------------------------------------------------------------------


def everything(a: Tensor, b: Tensor, c: Tensor, scores: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], dict]:
    """Every masked function on the same (B, A) numbers: results per token, and scalar sums."""
    gae, returns = losses.advantages(a, b, mask, 0.9, 0.8)
    tokens = {
        "rewards": losses.token_rewards(scores, a - b, mask, 0.1),
        "advantages": gae,
        "returns": returns,
        "whitened": losses.whiten(c, mask, 0.3, 2.0),
    }
    policy, value, sft = (
        losses.policy_loss(a, b, c, mask, 0.2),
        losses.value_loss(a, b, c, mask, 0.2),
        losses.sft_loss(a, mask),
    )
    sums = {"policy": policy.total, "value": value.total, "sft": sft.total, "ratio": losses.ratio_max(a, b, mask)}
    sums |= policy.metrics | value.metrics | losses.masked_moments(c, mask)._asdict()
    return tokens, sums


def padded(x: Tensor, rows: int, columns: int, fill: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns, 0, rows), value=fill)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (2, 0), (2, 3)])
def test_more_padding_changes_nothing(rows: int, columns: int):
    torch.manual_seed(0)
    a, b, c = (torch.randn(3, 5) for _ in range(3))
    scores = torch.randn(3)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 0]])
    a.requires_grad_()
    wide = padded(a.detach(), rows, columns, NAN).requires_grad_()
    tokens, sums = everything(a, b, c, scores, mask)
    wide_tokens, wide_sums = everything(
        wide,
        padded(b, rows, columns, NAN),
        padded(c, rows, columns, NAN),
        torch.nn.functional.pad(scores, (0, rows), value=NAN),
        padded(mask, rows, columns, 0),
    )
    assert len(tokens) == 4 and len(sums) == 13
    for name, value in tokens.items():
        assert torch.equal(wide_tokens[name], padded(value, rows, columns, 0.0)), name
    for name, value in sums.items():  # only the order of a sum may differ
        assert_close(wide_sums[name], value, rtol=1e-6, atol=1e-6, msg=name)
    (sums["policy"] + sums["value"] + sums["sft"]).backward()
    (wide_sums["policy"] + wide_sums["value"] + wide_sums["sft"]).backward()
    assert a.grad is not None and wide.grad is not None
    assert torch.equal(wide.grad, padded(a.grad, rows, columns, 0.0))
    assert a.grad[:2].abs().sum() > 0


# --- the KL penalty's coefficient -------------------------------------------------------------------------------------


def test_fixed_kl_stays():
    kl = losses.FixedKl(0.1)
    kl.update(1000.0, 64)
    kl.load({"coefficient": 7.0})
    assert kl.coefficient == 0.1


@pytest.mark.parametrize(
    ("kl_mean", "answers", "expected"),
    [
        (6.0, 64, 0.1),  # on target
        (12.0, 50, 0.101),  # error 1, cut to 0.2: 0.1 * (1 + 0.2 * 50 / 1000)
        (6.6, 50, 0.1005),  # error 0.1
        (-3.0, 50, 0.099),  # error -1.5, cut to -0.2
        (0.0, 100_000, 0.08),  # at most one horizon at once: 0.1 * 0.8, and not 0.1 * -19
    ],
)
def test_adaptive_kl_by_hand(kl_mean: float, answers: int, expected: float):
    kl = losses.AdaptiveKl(0.1, target=6.0, horizon=1000)
    kl.update(kl_mean, answers)
    assert kl.coefficient == pytest.approx(expected, abs=1e-12)
    resumed = losses.AdaptiveKl(0.1, target=6.0, horizon=1000)
    resumed.load(json.loads(json.dumps(kl.state())))
    assert resumed.coefficient == kl.coefficient


def test_adaptive_kl_refuses_what_is_not_a_number():
    with pytest.raises(ValueError, match="KL per answer is nan"):
        losses.AdaptiveKl(0.1, target=6.0, horizon=1000).update(NAN, 64)
