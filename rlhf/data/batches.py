"""From rows to tensors: order, padding and packing. Masks come from positions, never from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Answered(Protocol):
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def answer_ids(self) -> Sequence[int]: ...


class Order:
    """Which rows make up which global batch.

    Batches are consecutive slices of an endless chain of epochs, each a permutation of all rows drawn from
    (seed, epoch). So a batch may span two epochs, no row is left out, and the step is the position in the data.
    """

    def __init__(self, rows: int, seed: int):
        if rows < 1:
            raise ValueError(f"batches need at least one row, and there are {rows}")
        self.rows, self.seed = rows, seed
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def batch(self, step: int, size: int) -> list[int]:
        """Row indices of global batch `step`, counted from 0. A function of its arguments alone."""
        position, end = step * size, (step + 1) * size
        indices: list[int] = []
        while position < end:
            epoch, offset = divmod(position, self.rows)
            taken = self._of_epoch(epoch)[offset : offset + end - position]
            indices += taken.tolist()
            position += len(taken)
        return indices

    def _of_epoch(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        return self._permutation


def rank_slice(indices: list[int], rank: int, world_size: int) -> list[int]:
    """The rank's contiguous part. Raises ValueError when the parts would not be equal."""
    size, rest = divmod(len(indices), world_size)
    if rest:
        raise ValueError(f"{len(indices)} rows cannot be shared equally by {world_size} ranks")
    return indices[rank * size : (rank + 1) * size]


def collate(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    pad_id: int,
    multiple_of: int = 1,
    prompt_width: int | None = None,
    answer_width: int | None = None,
) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `answer_mask`, each (batch, length) int64; every answer starts at the same column.

    That column is `prompt_width`, or the longest prompt's length. Prompts are padded on the left, answers on the right;
    `multiple_of` rounds the length up on the right. Raises ValueError when a row is wider than the width given.
    """
    start = _width("prompt", prompts, prompt_width)
    length = start + _width("answer", answers, answer_width)
    length += -length % multiple_of
    input_ids = torch.full((len(prompts), length), pad_id, dtype=torch.int64)
    attention_mask, answer_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        first, last = start - len(prompt), start + len(answer)
        input_ids[row, first:last] = torch.tensor([*prompt, *answer], dtype=torch.int64)
        attention_mask[row, first:last] = 1
        answer_mask[row, start:last] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "answer_mask": answer_mask}


def _width(what: str, rows: Sequence[Sequence[int]], given: int | None) -> int:
    longest = max((len(row) for row in rows), default=0)
    if given is not None and longest > given:
        raise ValueError(f"one {what} has {longest} tokens, but {what}_width is {given}")
    return longest if given is None else given


def pack(rows: Sequence[Answered], length: int, pad_id: int) -> dict[str, Tensor]:
    """Several documents (prompt and answer) in one row of `length`: first-fit, in the order given.

    Returns what `collate` returns, each (packed rows, length) int64, and `segment_ids`: 0 for padding, otherwise the
    number of the document in its row, from 1. Positions and attention must restart with each. Raises ValueError when
    a document is longer than a row or has no prompt: its first token, which nothing predicts, would be an answer's.
    """
    bins: list[list[Answered]] = []
    space: list[int] = []
    for row in rows:
        size = len(row.prompt_ids) + len(row.answer_ids)
        if size > length:
            raise ValueError(f"a document of {size} tokens cannot be packed into rows of {length}")
        if not row.prompt_ids:
            raise ValueError("a document without a prompt cannot be packed")
        fitting = next((i for i, free in enumerate(space) if size <= free), None)
        if fitting is None:
            bins.append([])
            space.append(length)
            fitting = len(bins) - 1
        bins[fitting].append(row)
        space[fitting] -= size
    return _packed(bins, length, pad_id)


def _packed(bins: Sequence[Sequence[Answered]], length: int, pad_id: int) -> dict[str, Tensor]:
    input_ids = torch.full((len(bins), length), pad_id, dtype=torch.int64)
    answer_mask, segment_ids = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    for line, documents in enumerate(bins):
        first = 0
        for number, document in enumerate(documents, 1):
            start = first + len(document.prompt_ids)
            last = start + len(document.answer_ids)
            input_ids[line, first:last] = torch.tensor([*document.prompt_ids, *document.answer_ids], dtype=torch.int64)
            answer_mask[line, start:last] = 1
            segment_ids[line, first:last] = number
            first = last
    attention_mask = (segment_ids > 0).long()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "answer_mask": answer_mask,
        "segment_ids": segment_ids,
    }
