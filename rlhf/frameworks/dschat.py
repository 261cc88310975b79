"""DeepSpeed, set up as DeepSpeed-Chat sets it up, for ZeRO 0-3.

Its hybrid engine does not work with current transformers; generation between training steps is ours
(rlhf/generation.py) and this file gives it what it needs under ZeRO-3: weights gathered once for a whole rollout (A15).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger as deepspeed_logger
from torch import nn

from rlhf import distributed
from rlhf.config import Config
from rlhf.frameworks import Engine, EngineFramework, Frozen, Loss, MicroBatch, OptimizerSettings, Update
from rlhf.frameworks.gradients import GradientWatch

deepspeed_logger.setLevel(logging.ERROR)
# A CPU all-reduce for inference that DeepSpeed would compile at first use; gloo does here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class DeepSpeedChat(EngineFramework):
    def __init__(self, config: Config, device: torch.device):
        self.config, self.device = config, device
        self.zero_stage = config.zero.zero_stage
        self._partitioned_loading = None

    @contextmanager
    def building(self, trains: bool) -> Iterator[None]:
        """Under ZeRO-3 transformers partitions each weight as it is made, which also keeps its own initialisation."""
        if self.zero_stage < 3:
            yield
            return
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        keep_alive = HfDeepSpeedConfig(
            self._settings(3, micro_batch=1, accumulation=1, offload=self.config.zero.offload_parameters)
        )
        yield
        del keep_alive

    def _settings(
        self, zero_stage: int, micro_batch: int, accumulation: int, offload: bool, elements: int | None = None
    ) -> dict:
        """DeepSpeed's configuration. A bucket never exceeds the model's `elements`: it would only hold empty memory
        (A06)."""
        config, framework = self.config, self.config.framework
        bucket = min(framework.reduce_bucket_size, elements or framework.reduce_bucket_size)
        zero = {
            "stage": zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": min(framework.allgather_bucket_size, elements or framework.allgather_bucket_size),
            "overlap_comm": framework.overlap_comm and zero_stage > 0,
            "contiguous_gradients": True,
        }
        pin = self.device.type == "cuda"
        if config.zero.offload_optimizer and zero_stage > 0:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
        if offload and zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": pin}
        precision = config.precision
        return {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": precision.clip_grad_norm,
            "bf16": {"enabled": precision.dtype == "bf16"},
            "fp16": {
                "enabled": precision.dtype == "fp16",
                "loss_scale": precision.loss_scale,
                "initial_scale_power": precision.initial_scale_power,
            },
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 2**31,
            # its throughput timer waits for the device at every forward pass
            "timers": {"throughput": {"enabled": False, "synchronized": False}},
        }

    def trainable(self, model: nn.Module, settings: OptimizerSettings, role: str) -> Engine:
        elements = sum(_elements(p) for p in model.parameters() if p.requires_grad)
        ds_config = self._settings(
            self.zero_stage, settings.micro_batch, settings.accumulation, self.config.zero.offload_parameters, elements
        )
        optimizer = self._optimizer(model, settings)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(step, settings))
        initialize: Any = deepspeed.initialize  # its annotations are narrower than what it takes
        engine, *_ = initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config=ds_config,
        )
        if self.zero_stage == 0 and self.config.precision.dtype != "fp32":
            # its set-up runs an optimizer step on zero gradients, after which Adam's bias correction would start at 2
            engine.optimizer.optimizer.state.clear()
        return DeepSpeedEngine(self, engine, model, role)

    def _optimizer(self, model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
        adapters, others = [], []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                (adapters if "lora_" in name else others).append(parameter)
        groups = [
            {"params": params, "lr": rate}
            for params, rate in ((others, settings.learning_rate), (adapters, settings.adapter_learning_rate))
            if params
        ]
        arguments = {"lr": settings.learning_rate, "betas": settings.betas, "weight_decay": settings.weight_decay}
        on_host = self.config.zero.offload_optimizer and self.zero_stage > 0
        if on_host and self.device.type == "cuda":
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(groups, adamw_mode=True, **arguments)
        return torch.optim.AdamW(groups, fused=self.device.type == "cuda", **arguments)

    def frozen(self, model: nn.Module, offload: bool) -> Frozen:
        model.requires_grad_(False).eval()
        if self.zero_stage < 3:  # stages 1 and 2 shard nothing of a model without an optimizer
            return PlainFrozen(model, self.device, offload)
        ds_config = self._settings(3, 1, 1, offload, sum(_elements(p) for p in model.parameters()))
        ds_config["zero_optimization"].pop("offload_optimizer", None)
        engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        return ShardedFrozen(engine, model)


def _elements(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())


def schedule_factor(step: int, settings: OptimizerSettings) -> float:
    """Share of the learning rate in optimizer step `step` (0-based): a linear warm-up whose first step already learns,
    then cosine or linear decay to 0 at the end."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    if settings.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - progress if settings.schedule == "linear" else 1.0


class DeepSpeedEngine(Engine):
    def __init__(self, framework: DeepSpeedChat, engine, module: nn.Module, role: str):
        self.framework, self.engine, self.module, self.role = framework, engine, module, role
        self.device, self.zero_stage = framework.device, framework.zero_stage
        self._watch = GradientWatch(module, role, self.device)

    def __call__(self, **inputs):
        return self.engine(**inputs)

    def update(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Update:
        local = {name: sum(batch.weights[name] for batch in micro_batches) for name in micro_batches[0].weights}
        total = {name: max(weight, 1e-8) for name, weight in distributed.sum_over_ranks(local, self.device).items()}
        # DeepSpeed averages over micro-batches and ranks; shares must add up instead.
        undo_average = len(micro_batches) * distributed.world_size()
        assert len(micro_batches) == self.engine.gradient_accumulation_steps()
        metrics: dict[str, torch.Tensor] = {}
        maxima: dict[str, torch.Tensor] = {}
        learning_rate = self.engine.get_lr()[0]
        self.engine.train()
        for batch in micro_batches:
            objective = loss(self.engine, batch.inputs, total)
            self.engine.backward(objective.loss * undo_average)
            for name, value in {"loss": objective.loss.detach(), **objective.metrics}.items():
                metrics[name] = metrics.get(name, 0.0) + value
            for name, value in objective.maxima.items():
                maxima[name] = torch.maximum(maxima.get(name, value), value)
            if batch is not micro_batches[-1]:
                self.engine.step()  # no step is taken here: DeepSpeed counts micro-batches through this call
        self._watch.after_backward()
        norm = self._clip_unsharded_fp32()
        scale = self._loss_scale()
        self.engine.step()
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self._watch.after_step(applied=not skipped)
        self.engine.eval()
        norm = self.engine.get_global_grad_norm() if norm is None else norm
        return Update(
            metrics=distributed.sum_over_ranks(metrics, self.device)
            | {name: distributed.max_over_ranks(value.item(), self.device) for name, value in maxima.items()},
            grad_norm=float(norm) if norm is not None else math.nan,
            learning_rate=learning_rate,
            loss_scale=scale,
            skipped=skipped,
        )

    def _clip_unsharded_fp32(self) -> float | None:
        """At stage 0 in fp32 DeepSpeed clips with torch and keeps no norm: measure it first."""
        if self.zero_stage > 0 or self.framework.config.precision.dtype != "fp32":
            return None
        gradients = [p.grad for _, p in self.trainable() if p.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def _loss_scale(self) -> float:
        if self.framework.config.precision.dtype != "fp16":
            return 1.0
        optimizer = self.engine.optimizer
        return float(optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.cur_scale)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        self.module.eval()
        if self.zero_stage < 3:
            yield False
            return
        parameters = list(self.module.parameters())
        if not self._whole_model_fits(parameters):
            yield True
            return
        hooks = self.engine.optimizer.parameter_offload
        with self.gathered(parameters):
            hooks._remove_module_hooks()
            hooks.forward_hooks, hooks.backward_hooks = [], []
            try:
                yield False
            finally:
                hooks.setup_zero_stage3_hooks()

    def _whole_model_fits(self, parameters: list[nn.Parameter]) -> bool:
        """All ranks must agree, or some would gather while others generate."""
        wanted = self.framework.config.zero.gather_for_generation
        if wanted is not None:
            return wanted
        if self.device.type == "cpu":
            return True
        needed = sum(_elements(p) * p.element_size() for p in parameters)
        free, _ = torch.cuda.mem_get_info(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        # a third stays free for the cache and the logits of the rollout
        fits = needed < (free + reusable) * 2 / 3
        return distributed.max_over_ranks(float(not fits), self.device) == 0.0

    def gathered(self, parameters: Sequence[nn.Parameter], writing: bool = False):
        if self.zero_stage < 3:
            return nullcontext()
        return deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0 if writing else None)

    def save_state(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=self.role, save_latest=False)

    def load_state(self, folder: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(folder), tag=self.role)
        if path is None:
            raise ValueError(f"DeepSpeed could not load {self.role} from {folder}")


class PlainFrozen(Frozen):
    """The whole model on every rank; in host memory between uses if `offload`."""

    def __init__(self, module: nn.Module, device: torch.device, offload: bool):
        self.module, self.device, self.offload = module, device, offload
        module.to("cpu" if offload else device)

    @torch.no_grad()
    def __call__(self, **inputs):
        return self.module(**inputs)

    @contextmanager
    def resident(self) -> Iterator[None]:
        if not self.offload:
            yield
            return
        self.module.to(self.device)
        try:
            yield
        finally:
            self.module.to("cpu")


class ShardedFrozen(Frozen):
    """ZeRO-3 for a model without an optimizer; with offload its shards live in host memory and pass through the
    device."""

    def __init__(self, engine, module: nn.Module):
        self.engine, self.module = engine, module

    @torch.no_grad()
    def __call__(self, **inputs):
        return self.engine(**inputs)

    def resident(self):
        return nullcontext()
