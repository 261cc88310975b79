"""Masks by hand on five tokens (A36), packing, and the order of the data."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from rlhf.data import Demonstration, Order, collate, pack, rank_slice

END = 9  # also the pad token wherever a test says pad_id=END (A38)


def demonstration(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Demonstration:
    return Demonstration("", prompt, answer)


def lists(batch: dict[str, torch.Tensor]) -> dict[str, list[list[int]]]:
    assert all(values.dtype == torch.int64 for values in batch.values())
    return {name: values.tolist() for name, values in batch.items()}


def test_collate_five_tokens_by_hand():
    batch = collate([(1, 2), (3,)], [(4, END), (5, 6, END)], pad_id=0)
    assert lists(batch) == {
        "input_ids": [[1, 2, 4, END, 0], [0, 3, 5, 6, END]],
        "attention_mask": [[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]],
        "answer_mask": [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
    }


@pytest.mark.parametrize("pad_id", [END, 1, 3, 4, 777])
def test_collate_masks_do_not_depend_on_the_pad_token(pad_id):
    rows = ([(1, 2), (3,)], [(4, END), (5, 6, END)])
    batch, other = collate(*rows, pad_id=pad_id), collate(*rows, pad_id=0)
    assert torch.equal(batch["attention_mask"], other["attention_mask"])
    assert torch.equal(batch["answer_mask"], other["answer_mask"])
    assert batch["input_ids"][0].tolist() == [1, 2, 4, END, pad_id]
    # The end token keeps its label, and padding that looks like it gets none (A38).
    assert batch["answer_mask"][0].tolist() == [0, 0, 1, 1, 0]


def test_collate_of_prompts_alone():
    batch = collate([(1,), (2, 3, 4)], [(), ()], pad_id=END)
    assert lists(batch) == {
        "input_ids": [[END, END, 1], [2, 3, 4]],
        "attention_mask": [[0, 0, 1], [1, 1, 1]],
        "answer_mask": [[0, 0, 0], [0, 0, 0]],
    }


def test_collate_widths_and_rounding_leave_the_answers_column():
    batch = collate([(1,)], [(2, END)], pad_id=0, multiple_of=8, prompt_width=2, answer_width=3)
    assert lists(batch) == {
        "input_ids": [[0, 1, 2, END, 0, 0, 0, 0]],
        "attention_mask": [[0, 1, 1, 1, 0, 0, 0, 0]],
        "answer_mask": [[0, 0, 1, 1, 0, 0, 0, 0]],
    }


@pytest.mark.parametrize("what", ["prompt", "answer"])
def test_collate_never_cuts(what):
    with pytest.raises(ValueError, match=f"one {what} has 3 tokens, but {what}_width is 2"):
        collate([(1, 2, 3)], [(4, 5, END)], pad_id=0, **{f"{what}_width": 2})


def test_collate_refuses_unequal_numbers_of_prompts_and_answers():
    with pytest.raises(ValueError):
        collate([(1,), (2,)], [(3,)], pad_id=0)


def test_pack_by_hand():
    # Lengths 3, 4, 2, 1 into rows of 5: the first fit of 2 is beside 3, that of 1 beside 4.
    rows = [
        demonstration((1, 2), (END,)),
        demonstration((3,), (4, 5, END)),
        demonstration((6,), (END,)),
        demonstration((7,), ()),
    ]
    assert lists(pack(rows, length=5, pad_id=END)) == {
        "input_ids": [[1, 2, END, 6, END], [3, 4, 5, END, 7]],
        "attention_mask": [[1] * 5, [1] * 5],
        "answer_mask": [[0, 0, 1, 0, 1], [0, 1, 1, 1, 0]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 1, 1, 1, 2]],
    }
    padded = pack(rows[:2], length=6, pad_id=END)
    assert padded["segment_ids"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    assert padded["answer_mask"].tolist() == [[0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert padded["input_ids"][0].tolist() == [1, 2, END, END, END, END]


def test_pack_keeps_every_document_whole():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 6, (40, 2), generator=generator).tolist()
    counter = itertools.count(100)
    rows = [
        demonstration(tuple(next(counter) for _ in range(p)), tuple(next(counter) for _ in range(a))) for p, a in sizes
    ]
    batch = pack(rows, length=12, pad_id=0)
    found = {}
    for ids, answers, segments in zip(batch["input_ids"], batch["answer_mask"], batch["segment_ids"], strict=True):
        for number in range(1, int(segments.max()) + 1):
            ids_of = ids[segments == number].tolist()
            found[tuple(ids_of)] = int(answers[segments == number].sum())
    assert found == {(*row.prompt_ids, *row.answer_ids): len(row.answer_ids) for row in rows}
    assert len(batch["input_ids"]) < len(rows) / 1.5


def test_pack_refuses_what_it_would_have_to_cut_or_mislabel():
    with pytest.raises(ValueError, match="a document of 6 tokens cannot be packed into rows of 5"):
        pack([demonstration((1, 2, 3), (4, 5, END))], length=5, pad_id=0)
    with pytest.raises(ValueError, match="without a prompt"):
        pack([demonstration((), (4, END))], length=5, pad_id=0)


@dataclass(frozen=True)
class Case:
    rows: int
    size: int
    seed: int


# Batches smaller and larger than the data, dividing it and not.
CASES = [Case(rows, size, seed) for rows in (1, 2, 7, 12, 30) for size in (1, 3, 4, 12, 31) for seed in (0, 5)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_epoch_of_the_order_is_a_permutation(case):
    order = Order(case.rows, case.seed)
    epochs = 3
    steps = -(-epochs * case.rows // case.size)
    chain = [index for step in range(steps) for index in order.batch(step, case.size)]
    assert len(chain) == steps * case.size
    for epoch in range(epochs):
        part = chain[epoch * case.rows : (epoch + 1) * case.rows]
        assert sorted(part) == list(range(case.rows))


def test_order_depends_on_step_and_size_alone():
    read = Order(50, seed=3)
    forwards = [read.batch(step, 8) for step in range(30)]
    resumed = Order(50, seed=3)
    assert [resumed.batch(step, 8) for step in range(17, 30)] == forwards[17:]
    # Two batches of 4 are one of 8: accumulation and ranks do not change what is learnt from.
    assert [resumed.batch(2 * step, 4) + resumed.batch(2 * step + 1, 4) for step in reversed(range(30))] == forwards[
        ::-1
    ]


def test_order_changes_with_seed_and_epoch():
    first, second = (Order(100, seed=1).batch(epoch, 100) for epoch in range(2))
    assert first != second
    assert first != Order(100, seed=2).batch(0, 100)
    assert first != list(range(100))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_ranks_share_the_global_batch(world_size):
    indices = Order(50, seed=0).batch(4, 12)
    slices = [rank_slice(indices, rank, world_size) for rank in range(world_size)]
    assert {len(part) for part in slices} == {12 // world_size}
    assert [index for part in slices for index in part] == indices


def test_ranks_cannot_share_unequally_and_no_rows_make_no_batch():
    with pytest.raises(ValueError, match="12 rows cannot be shared equally by 5 ranks"):
        rank_slice(list(range(12)), 0, 5)
    with pytest.raises(ValueError, match="at least one row"):
        Order(0, seed=0)
