"""The few collectives that stages need. Without a process group every one is the identity of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def sum_over_ranks(values: Mapping[str, float | torch.Tensor], device: torch.device) -> dict[str, float]:
    """Sums each value over all ranks in fp64, in one collective. Every rank must bring the same keys."""
    names = sorted(values)
    packed = torch.stack([torch.as_tensor(values[name], dtype=torch.float64, device=device) for name in names])
    if world_size() > 1:
        dist.all_reduce(packed)
    return dict(zip(names, packed.tolist(), strict=True))


def max_over_ranks(value: float, device: torch.device) -> float:
    packed = torch.tensor(value, dtype=torch.float64, device=device)
    if world_size() > 1:
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return packed.item()


def gather_objects(item: Any) -> list[Any]:
    """Every rank's `item`, in rank order, on every rank."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def from_rank_zero(item: Any) -> Any:
    if world_size() == 1:
        return item
    box = [item]
    dist.broadcast_object_list(box, src=0)
    return box[0]
