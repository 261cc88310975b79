"""Sampling by inverse distribution, and answers that depend on nothing but their own row."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf.config import ModelShape
from rlhf.generation import NonFiniteLogitsError, Sampling, generate, restrict, sample, uniforms
from rlhf.models.families import config_arguments
from rlhf.models.heads import PolicyModel, ScalarModel, score_at_last_token

CPU = torch.device("cpu")
FAMILIES = ("llama", "gpt2", "opt", "gpt_neox", "qwen2", "bloom")
# What these families demand of a shape: rlhf/models/families.py refuses others.
PECULIAR = {
    "gpt2": {"gated_mlp": False, "attention_bias": True, "mlp_bias": True},
    "opt": {"gated_mlp": False, "attention_bias": True, "mlp_bias": True},
    "gpt_neox": {"gated_mlp": False, "attention_bias": True, "mlp_bias": True, "tied_embeddings": False},
    "qwen2": {"kv_heads": 2, "attention_bias": True},
    "bloom": {"gated_mlp": False, "attention_bias": True, "mlp_bias": True},
    "llama": {"kv_heads": 2},
}


def plain_sampling(**changes) -> Sampling:
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 10, "end_id": 1, "pad_id": 0}
    return Sampling(**usual | changes)


def hf_config(family: str):
    from transformers import AutoConfig

    shape = {
        "family": family, "layers": 2, "hidden": 32, "intermediate": 128, "heads": 4, "kv_heads": 4, "head_dim": 8,
        "vocabulary": 64, "max_length": 64, "gated_mlp": True, "tied_embeddings": True, "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    attention = "eager" if family == "bloom" else "sdpa"  # as in conf/model: transformers has no other for BLOOM
    arguments = config_arguments(ModelShape(**shape | PECULIAR[family])) | ends  # type: ignore[arg-type]
    return AutoConfig.for_model(family, **arguments, initializer_range=0.3, attn_implementation=attention)


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request) -> PolicyModel:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    return PolicyModel(AutoModelForCausalLM.from_config(hf_config(request.param)).eval())


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Four left-padded prompts of 7, 4, 2 and 5 tokens."""
    tokens = torch.randint(2, 64, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    for row, length in enumerate((7, 4, 2, 5)):
        mask[row, : 7 - length] = 0
    return tokens * mask, mask


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.5, -1.0, 1.0, -torch.inf, 0.0]).repeat(20_000, 1)
    uniform = uniforms(0, 0, [0], 20_000, CPU)[0]
    tokens, log_probs = sample(logits, uniform, plain_sampling(temperature=1.5))
    expected = (logits[0] / 1.5).softmax(0)
    counts = torch.bincount(tokens, minlength=6).double()
    assert counts[4] == 0
    likely = expected > 0
    statistic = ((counts - 20_000 * expected) ** 2 / (20_000 * expected))[likely].sum()
    assert statistic < 18.5  # chi-square of 4 degrees of freedom passes this once in a thousand
    assert torch.allclose(log_probs, expected.log()[tokens])


@pytest.mark.parametrize("uniform", [0.0, 1e-8, 0.5, 1 - 2**-24])
def test_impossible_tokens_are_never_drawn(uniform) -> None:
    """Not at either end of [0, 1) either, where a cumulative sum that misses 1 by rounding would let them in."""
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, 7:4000] = torch.linspace(-3, 3, 3993)
    token, _ = sample(logits, torch.tensor([uniform]), plain_sampling())
    assert 7 <= token.item() < 4000


def test_nucleus_keeps_the_smallest_set() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.15, 0.25]]).log()
    for top_p, kept in ((0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.76, {1, 2, 3}), (0.95, {0, 1, 2, 3}), (1e-9, {1})):
        found = restrict(logits, 0, top_p)[0].isfinite().nonzero().flatten().tolist()
        assert set(found) == kept, top_p
    assert restrict(logits, 2, 1.0)[0].isfinite().tolist() == [False, True, False, True]
    assert restrict(logits, 100, 1.0).equal(logits)
    # both: the nucleus is taken of what top-k left, in which 1 has 2/3
    assert restrict(logits, 2, 0.66)[0].isfinite().tolist() == [False, True, False, False]


def test_log_probs_are_of_the_whole_distribution() -> None:
    """Before top-k and top-p, as the update computes them."""
    logits = torch.tensor([[3.0, 1.0, 2.0]])
    token, log_prob = sample(logits, torch.tensor([0.99]), plain_sampling(top_k=1))
    assert token.item() == 0 and log_prob.item() == pytest.approx(logits.log_softmax(-1)[0, 0].item())


def test_every_row_has_its_own_stream() -> None:
    whole = uniforms(5, 2, range(6), 4, CPU)
    assert torch.cat([uniforms(5, 2, [0, 1], 4, CPU), uniforms(5, 2, range(2, 6), 4, CPU)]).equal(whole)
    assert len(whole.unique()) == 24
    for other in (uniforms(5, 3, range(6), 4, CPU), uniforms(6, 2, range(6), 4, CPU)):
        assert not set(other.flatten().tolist()) & set(whole.flatten().tolist())


def test_greedy_generation_equals_transformers(policy) -> None:
    ids, mask = prompts()
    found = generate(policy, ids, mask, uniforms(0, 0, range(4), 10, CPU), plain_sampling(top_k=1), sharded=False)
    expected = policy.transformers_model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=1
    )[:, 7:]
    width = min(found.tokens.shape[1], expected.shape[1])
    assert found.tokens[:, :width].equal(expected[:, :width])
    assert found.mask.sum(1).tolist() == [10 if 1 not in row else row.index(1) + 1 for row in expected.tolist()]


def test_generation_sees_the_log_probs_that_the_update_sees(policy) -> None:
    ids, mask = prompts()
    sampling = plain_sampling(temperature=0.7)
    answers = generate(policy, ids, mask, uniforms(1, 0, range(4), 10, CPU), sampling, sharded=False)
    with torch.no_grad():
        whole, attention = torch.cat([ids, answers.tokens], 1), torch.cat([mask, answers.mask], 1)
        log_probs, _ = policy(whole, attention, answer_start=7, temperature=0.7)
    real = answers.mask.bool()
    assert (log_probs - answers.log_probs)[real].abs().max() < 1e-5
    assert (answers.tokens[~real] == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_do_not_depend_on_the_split(policy, size) -> None:
    ids, mask = prompts()
    noise = uniforms(2, 0, range(4), 10, CPU)
    whole = generate(policy, ids, mask, noise, plain_sampling(), sharded=False)
    for at in range(0, 4, size):
        s = slice(at, at + size)
        start = int(mask[s].argmax(1).min())  # no more padding than these rows need
        part = generate(policy, ids[s, start:], mask[s, start:], noise[s], plain_sampling(), sharded=False)
        for row in range(len(part.tokens)):
            length = int(part.mask[row].sum())
            assert length == whole.mask[at + row].sum() and part.truncated[row] == whole.truncated[at + row]
            assert part.tokens[row, :length].equal(whole.tokens[at + row, :length])


def padded(x: torch.Tensor, left: int, right: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (left, right))


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 4)])
def test_padding_changes_no_log_prob(policy, left, right) -> None:
    """A35."""
    ids, mask = prompts()
    with torch.no_grad():
        expected, entropy = policy(ids, mask, answer_start=6, with_entropy=True)
        found, more = policy(
            padded(ids, left, right), padded(mask, left, right), answer_start=6 + left, with_entropy=True
        )
    assert (found[:, :1] - expected).abs().max() < 1e-5
    assert entropy is not None and more is not None and (more[:, :1] - entropy).abs().max() < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_score(family) -> None:
    """A37: the score is read by the mask; the pad id is a token of the text here, and a row may even end with it."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(4)
    config = hf_config(family)
    config.num_labels = 1
    model = ScalarModel(AutoModelForSequenceClassification.from_config(config).eval())
    ids, mask = prompts()
    ids[0, -1] = 0

    def scores(left: int, right: int) -> torch.Tensor:
        attention = padded(mask, left, right)
        with torch.no_grad():
            return score_at_last_token(model(padded(ids, left, right), attention), attention)

    expected = scores(0, 0)
    assert len(expected.unique()) == 4
    for left, right in ((4, 0), (0, 4), (2, 3)):
        assert (scores(left, right) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_row_without_finite_logits_is_named(policy, monkeypatch, bad) -> None:
    """A20."""
    original = policy.forward

    def broken(*args, **kwargs):
        logits, entropy = original(*args, **kwargs)
        logits[2, 5] = bad
        return logits, entropy

    monkeypatch.setattr(policy, "forward", broken)
    ids, mask = prompts()
    with pytest.raises(NonFiniteLogitsError, match=r"inf or NaN in .* row 2$"):
        generate(policy, ids, mask, uniforms(0, 0, range(4), 10, CPU), plain_sampling(), sharded=False)
