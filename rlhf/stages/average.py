"""The exponential moving average of the actor's weights, as DeepSpeed-Chat offers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlhf.frameworks import Engine


class MovingAverage:
    """fp32 copies in host memory of the actor's trainable tensors, updated after each of its optimizer steps."""

    def __init__(self, actor: Engine, decay: float):
        self.actor, self.decay = actor, decay
        self.shadow: dict[str, torch.Tensor] = dict(self._current())

    def _current(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.actor.trainable():
            with self.actor.gathered([parameter]):
                value = parameter.detach().to("cpu", torch.float32, copy=True)
            yield name, value

    def update(self) -> None:
        for name, value in self._current():
            self.shadow[name].lerp_(value, 1 - self.decay)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"average.{name}": value for name, value in self.shadow.items()}

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name in self.shadow:
            self.shadow[name] = tensors[f"average.{name}"]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The span in which the actor's tensors hold the average. Nothing trains meanwhile."""
        parameters = dict(self.actor.trainable())
        kept = {}
        for name, parameter in parameters.items():
            with self.actor.gathered([parameter], writing=True), torch.no_grad():
                kept[name] = parameter.detach().to("cpu", copy=True)
                parameter.copy_(self.shadow[name])
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                with self.actor.gathered([parameter], writing=True), torch.no_grad():
                    parameter.copy_(kept[name])
