"""Both seams. The worker knows `Framework`; the stages know `EngineFramework`, `Engine` and `Frozen`, and nothing
below.

A framework that owns its training loop (trlx) implements `Framework` itself. One that wraps a model implements
`EngineFramework`: its `train` runs our stage on its engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlhf.config import Config

if TYPE_CHECKING:
    from rlhf.worker import Run


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass sees on one rank.

    `inputs` are handed to the loss. `weights` says how many items of each kind it holds (answer tokens, pairs), so that
    the mean is over the total batch, however it is cut into micro-batches and ranks.
    """

    inputs: dict[str, Any]
    weights: dict[str, float]


@dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the loss and of the metrics of the total batch: shares over micro-batches and ranks
    add up.

    `maxima` are not shares: the largest over micro-batches and ranks counts.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    maxima: dict[str, Tensor] = field(default_factory=dict)


# loss(model, inputs, total) -> Objective; `total` holds the weights of the total batch
Loss = Callable[[nn.Module, dict[str, Any], dict[str, float]], Objective]


@dataclass(frozen=True)
class Update:
    """What one optimizer step did. `grad_norm` is before clipping; `skipped` is an fp16 overflow."""

    metrics: dict[str, float]  # with "loss"
    grad_norm: float
    learning_rate: float
    loss_scale: float
    skipped: bool


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. `steps` counts optimizer steps; `accumulation` micro-batches per step on one rank."""

    learning_rate: float
    adapter_learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    schedule: str
    warmup_steps: int
    steps: int
    micro_batch: int
    accumulation: int


class Frozen(ABC):
    """A model that only answers."""

    module: Any  # PolicyModel or ScalarModel

    @abstractmethod
    def __call__(self, **inputs) -> Any:
        """`module.forward` with whole weights."""

    @abstractmethod
    def resident(self) -> AbstractContextManager[None]:
        """The span in which the model is on the device, if it is kept in host memory otherwise."""


class Engine(ABC):
    """A model that learns. It owns zero-grad, micro-batches, their division, clipping, step and schedule."""

    module: Any  # PolicyModel or ScalarModel

    @abstractmethod
    def __call__(self, **inputs) -> Any:
        """`module.forward` with whole weights; gradients as the caller's context says."""

    @abstractmethod
    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Update:
        """One optimizer step. Every rank must bring the same number of micro-batches (A17)."""

    @abstractmethod
    def generating(self) -> AbstractContextManager[bool]:
        """The span of a rollout. Yields whether weights stay sharded in it, so that ranks must keep in step (A16)."""

    @abstractmethod
    def gathered(self, parameters: Sequence[nn.Parameter], writing: bool = False) -> AbstractContextManager[None]:
        """The span in which these parameters are whole on every rank; with `writing`, rank 0's changes stay.
        Collective."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Everything needed to go on bit for bit: weights, optimizer, schedule, loss scale. Collective."""

    @abstractmethod
    def load_state(self, folder: Path) -> None: ...

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.module.named_parameters() if p.requires_grad)


class Framework(ABC):
    @abstractmethod
    def train(self, config: Config, run: Run) -> dict[str, float]:
        """Runs `run.stage` to its end and returns the final and held-out metrics."""


class EngineFramework(Framework):
    def train(self, config: Config, run: Run) -> dict[str, float]:
        from rlhf.stages import STAGES

        return STAGES[run.stage.name](config, self, run)

    @abstractmethod
    def building(self, trains: bool) -> AbstractContextManager[None]:
        """The span in which a model is constructed and its weights are loaded, sharded where the framework can
        (A02)."""

    @abstractmethod
    def trainable(self, model: nn.Module, settings: OptimizerSettings, role: str) -> Engine: ...

    @abstractmethod
    def frozen(self, model: nn.Module, offload: bool) -> Frozen: ...


def load(config: Config, device: torch.device) -> Framework:
    """The framework of `config.framework`; imported here, so that the others need not be installed."""
    from rlhf.frameworks.dschat import DeepSpeedChat

    frameworks = {"dschat": DeepSpeedChat}
    return frameworks[config.framework.name](config, device)
