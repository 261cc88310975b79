"""Watches the first updates for parameters that were meant to learn and do not (A21)."""

from __future__ import annotations

import torch
from torch import nn

from rlhf import distributed

# A LoRA pair starts with B = 0, so A's gradient is exactly zero until B has moved.
UPDATES_WATCHED = 3


class DeadParameterError(RuntimeError):
    """A trainable tensor got no gradient, or only zeros."""


class GradientWatch:
    """Hooks every trainable tensor for the first applied updates.

    After the first backward pass a tensor without any gradient is an error; after `UPDATES_WATCHED` applied updates
    one that only ever saw zeros is. Works on the gradient as autograd makes it, before any engine shards or frees it.
    """

    def __init__(self, module: nn.Module, role: str, device: torch.device):
        self.role, self.device = role, device
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.seen = torch.zeros(len(self.names), device=device)
        self.moved = torch.zeros(len(self.names), device=device)
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.handles = [p.register_hook(self._hook(index)) for index, p in enumerate(parameters)]
        self.applied = 0
        self.checked_arrival = False

    def _hook(self, index: int):
        def look(gradient: torch.Tensor) -> None:
            self.seen[index] = 1
            self.moved[index] = torch.maximum(self.moved[index], (gradient != 0).any().float())

        return look

    def after_backward(self) -> None:
        if not self.checked_arrival and self.handles:
            self.checked_arrival = True
            self._require(self.seen, "got no gradient in the first backward pass")

    def after_step(self, applied: bool) -> None:
        if not self.handles or not applied:
            return
        self.applied += 1
        if self.applied < UPDATES_WATCHED:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._require(self.moved, f"got only zero gradients in {UPDATES_WATCHED} updates")

    def _require(self, flags: torch.Tensor, complaint: str) -> None:
        if distributed.world_size() > 1:
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        dead = [name for name, flag in zip(self.names, flags.tolist(), strict=True) if flag == 0]
        if dead:
            raise DeadParameterError(
                f"{len(dead)} of {len(self.names)} trainable tensors of the {self.role} {complaint}, first {dead[0]}: "
                "the model would not learn. Known causes: gradient checkpointing around frozen inputs, a detached loss"
            )
