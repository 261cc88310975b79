"""The engine seam in plain torch on one rank: what every engine's first steps must equal. For tests only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from rlhf.config import Config
from rlhf.frameworks import Engine, EngineFramework, Frozen, Loss, MicroBatch, OptimizerSettings, Update
from rlhf.frameworks.dschat import schedule_factor


class Plain(EngineFramework):
    def __init__(self, config: Config, device: torch.device):
        self.config = config

    def building(self, trains: bool):
        return nullcontext()

    def trainable(self, model: nn.Module, settings: OptimizerSettings, role: str) -> Engine:
        return PlainEngine(model, settings, self.config.precision.clip_grad_norm)

    def frozen(self, model: nn.Module, offload: bool) -> Frozen:
        return PlainFrozen(model.eval())


class PlainFrozen(Frozen):
    def __init__(self, module: nn.Module):
        self.module = module

    @torch.no_grad()
    def __call__(self, **inputs):
        return self.module(**inputs)

    def resident(self):
        return nullcontext()


class PlainEngine(Engine):
    """fp32 master weights and gradients; the model computes in its own precision, gradients are never scaled."""

    def __init__(self, module: nn.Module, settings: OptimizerSettings, clip: float):
        self.module, self.settings, self.clip, self.steps = module.eval(), settings, clip, 0
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self.trainable()}
        rates = {name: self._base_rate(name) for name in self.masters}
        self.optimizer = torch.optim.AdamW(
            [{"params": [p], "lr": rates[name], "base": rates[name]} for name, p in self.masters.items()],
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )

    def _base_rate(self, name: str) -> float:
        return self.settings.adapter_learning_rate if "lora_" in name else self.settings.learning_rate

    def __call__(self, **inputs):
        return self.module(**inputs)

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Update:
        total = {name: sum(batch.weights[name] for batch in micro_batches) for name in micro_batches[0].weights}
        metrics: dict[str, float] = {}
        maxima: dict[str, float] = {}
        gradients = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.module.train()
        for batch in micro_batches:
            objective = loss(self.module, batch.inputs, total)
            objective.loss.backward()
            for name, parameter in self.trainable():
                if parameter.grad is not None:
                    gradients[name] += parameter.grad.float()
                    parameter.grad = None
            for name, value in {"loss": objective.loss, **objective.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
            for name, value in objective.maxima.items():
                maxima[name] = max(maxima.get(name, -math.inf), value.item())
        self.module.eval()
        for name, master in self.masters.items():
            master.grad = gradients[name].detach()
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self.clip or math.inf).item()
        factor = schedule_factor(self.steps, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base"] * factor
        self.optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for name, parameter in self.trainable():
                parameter.copy_(self.masters[name])
        return Update(metrics | maxima, norm, self.optimizer.param_groups[0]["lr"], 1.0, skipped=False)

    @contextmanager
    def generating(self):
        yield False

    def gathered(self, parameters, writing: bool = False):
        return nullcontext()

    def save_state(self, folder: Path) -> None:
        raise NotImplementedError("the tests resume DeepSpeed's runs only")

    def load_state(self, folder: Path) -> None:
        raise NotImplementedError("the tests resume DeepSpeed's runs only")
