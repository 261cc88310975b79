"""Sampling answers between training steps: the role of DeepSpeed-Chat's hybrid engine.

A batch is sampled with a static key/value cache that lives only inside `generate`, so its memory is free before the
update. On CUDA one decode step is captured as a graph and replayed. Every row's randomness comes from its own stream
of uniform numbers, so an answer does not depend on how rows are spread over ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, StaticCache

from rlhf import distributed
from rlhf.models.heads import PolicyModel, positions_from_mask, visible

# How many tokens are sampled between two looks at whether every row has ended: each look waits for the device.
CHECK_EVERY = 8


class NonFiniteLogitsError(RuntimeError):
    """The policy's next-token distribution of `row` of the batch holds inf or NaN (A20)."""

    def __init__(self, row: int):
        super().__init__(f"inf or NaN in the sampling probabilities of row {row}")
        self.row = row


@dataclass(frozen=True)
class Sampling:
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    end_id: int
    pad_id: int


@dataclass(frozen=True)
class Answers:
    """`tokens` (batch, new tokens), with padding after the end token; `mask` is 1 up to and including the end token.

    `log_probs` are of the tokens under the policy at the sampling temperature, before top-k and top-p.
    `truncated` rows reached the length limit without an end token.
    """

    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    truncated: Tensor


def uniforms(seed: int, step: int, rows: Sequence[int], length: int, device: torch.device) -> Tensor:
    """One stream of uniform numbers in [0, 1) per row of the global batch: (rows, length), the same on any
    rank and device."""
    streams = []
    for row in rows:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + row)
        streams.append(torch.rand(length, generator=generator))
    return torch.stack(streams).to(device)


def restrict(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with everything outside top-k and the nucleus at -inf. The most likely token always stays."""
    if top_k:
        threshold = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        probabilities = ordered.softmax(-1)
        outside = probabilities.cumsum(-1) - probabilities >= top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)
    return logits


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draws by inverting the distribution function at `uniform` (batch,). Tokens and log-probs, (batch,)."""
    logits = logits.float() / sampling.temperature
    log_probs = logits.log_softmax(-1)
    cumulative = restrict(logits, sampling.top_k, sampling.top_p).softmax(-1).cumsum(-1)
    # the total is 1 up to rounding: scaled by it, no draw falls outside the vocabulary or on a token of probability 0
    target = (uniform * cumulative[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulative, target, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)


class _Decoder:
    """Sampling state of one batch in tensors of fixed address, so that a step can be captured and replayed."""

    def __init__(
        self,
        policy: PolicyModel,
        input_ids: Tensor,
        attention_mask: Tensor,
        uniform: Tensor,
        sampling: Sampling,
        sharded: bool,
    ):
        self.policy, self.sampling, self.uniform = policy, sampling, uniform
        # Frameworks hang work for training on the model's call (DeepSpeed waits for the device there, which no graph
        # can capture). Only sharded weights need it, to be gathered.
        self.call = policy if sharded else policy.forward
        batch, self.prompt_width = input_ids.shape
        device, new = input_ids.device, sampling.max_new_tokens
        self.tokens = torch.full((batch, new), sampling.pad_id, device=device)
        self.mask = torch.zeros((batch, new), dtype=torch.long, device=device)
        self.log_probs = torch.zeros((batch, new), device=device)
        self.running = torch.ones(batch, dtype=torch.bool, device=device)
        self.broken = torch.zeros(batch, dtype=torch.bool, device=device)
        self.current = torch.zeros((batch, 1), dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.position = positions_from_mask(attention_mask)[:, -1:].clone()
        self._open_cache(input_ids, attention_mask)

    def _open_cache(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        width = attention_mask.shape[1]
        length = width + self.sampling.max_new_tokens
        config = self.policy.transformers_model.config
        self.static = self.policy.takes_visible(length)
        positions = positions_from_mask(attention_mask) if self.policy.takes_positions else None
        if self.static:
            self.cache = StaticCache(config=config, max_cache_len=length)
            prompt_mask = visible(attention_mask, keys=length)
            self.seen = functional.pad(attention_mask.bool(), (0, length - width))[:, None, None, :]
            logits = self._forward(input_ids, self.policy.as_attention_mask(prompt_mask), positions)
        else:
            self.cache = DynamicCache(config=config)
            self.seen = functional.pad(attention_mask, (0, length - width))
            logits = self._forward(input_ids, attention_mask, positions)
        self._take(logits)

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None) -> Tensor:
        inputs: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
        return self.call(input_ids, attention_mask, past_key_values=self.cache, use_cache=True, **inputs)[0]

    def _take(self, logits: Tensor) -> None:
        """Samples column `count` from `logits` and ends the rows that drew the end token."""
        self.broken |= self.running & ~logits.isfinite().all(-1)
        uniform = self.uniform.index_select(1, self.count).squeeze(1)
        token, log_prob = sample(logits, uniform, self.sampling)
        token = torch.where(self.running, token, self.sampling.pad_id)
        self.tokens.index_copy_(1, self.count, token.unsqueeze(1))
        self.mask.index_copy_(1, self.count, self.running.long().unsqueeze(1))
        self.log_probs.index_copy_(1, self.count, torch.where(self.running, log_prob, 0.0).unsqueeze(1))
        self.running &= token != self.sampling.end_id
        self.current.copy_(token.unsqueeze(1))
        self.count += 1
        self.position += 1

    def step(self) -> None:
        column = self.count + (self.prompt_width - 1)
        if self.static:
            self.seen.index_fill_(3, column, True)
            logits = self._forward(self.current, self.policy.as_attention_mask(self.seen), self.position)
        else:
            self.seen.index_fill_(1, column, 1)
            upto = int(column) + 1
            positions = self.position if self.policy.takes_positions else None
            logits = self._forward(self.current, self.seen[:, :upto], positions)
        self._take(logits)

    def stepper(self, steps: int):
        """The function that takes one step: on CUDA, after two ordinary ones, a replayed graph if that pays off."""
        if not (self.static and self.tokens.is_cuda and steps > 2 * CHECK_EVERY):
            return self.step
        stream = _side_stream(self.tokens.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of CUDA meanwhile (the memory monitor does) must not void the capture
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()
        return graph.replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all rollouts: cuBLAS keeps a workspace (32 MiB on Hopper) for every stream that it has ever seen."""
    return torch.cuda.Stream(device)


@torch.no_grad()
def generate(
    policy: PolicyModel, input_ids: Tensor, attention_mask: Tensor, uniform: Tensor, sampling: Sampling, sharded: bool
) -> Answers:
    """Samples one answer per left-padded prompt. `input_ids`, `attention_mask`: (batch, prompt width); `uniform`:
    (batch, new).

    `sharded`: weights are gathered at every use, so every rank runs as many forward passes as the slowest (A16).
    Raises NonFiniteLogitsError naming the first such row.
    """
    decoder = _Decoder(policy, input_ids, attention_mask, uniform, sampling, sharded)
    taken, step = 1, None
    while taken < sampling.max_new_tokens:
        if taken % CHECK_EVERY == 0 and not _anybody_running(decoder, sharded):
            break
        if step is None:
            step = decoder.step if sharded else decoder.stepper(sampling.max_new_tokens - taken)
            taken = int(decoder.count)  # finding the stepper may have taken steps
            if taken >= sampling.max_new_tokens:
                break
        step()
        taken += 1
    if decoder.broken.any():
        raise NonFiniteLogitsError(int(decoder.broken.nonzero()[0]))
    width = max(1, int(decoder.mask.sum(1).max()))
    ended = (decoder.tokens == sampling.end_id) & decoder.mask.bool()
    return Answers(
        tokens=decoder.tokens[:, :width],
        mask=decoder.mask[:, :width],
        log_probs=decoder.log_probs[:, :width],
        truncated=~ended.any(1),
    )


def _anybody_running(decoder: _Decoder, sharded: bool) -> bool:
    running = float(decoder.running.any())
    return (distributed.max_over_ranks(running, decoder.running.device) if sharded else running) > 0
