"""PPO's four roles, built one after the other so that loading never holds two at once (A02)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlhf.config import Config
from rlhf.frameworks import Engine, EngineFramework, Frozen
from rlhf.models.build import build_policy, build_scalar, read_reward_statistics
from rlhf.rewarding import FunctionReward, ModelReward, Reward
from rlhf.stages.rollout import AdapterlessActor, Roles
from rlhf.stages.supervised import optimizer_settings

if TYPE_CHECKING:
    from rlhf.worker import Run


def build_roles(config: Config, framework: EngineFramework, run: Run) -> Roles:
    stage = run.stage
    updates = stage.ppo_epochs * stage.rollout_batch // stage.total_batch
    actor = _policy(config, framework, run, stage.steps * updates)
    reference = AdapterlessActor(actor) if config.lora.enabled else _reference(config, framework, run)
    reward = _reward(config, framework, run)
    critic = _critic(config, framework, run, stage.steps * updates)
    if isinstance(reward, ModelReward) and stage.critic_from_reward_model:
        _require_equal(run, critic, reward.model)
    return Roles(actor, critic, reference, reward)


def _policy(config: Config, framework: EngineFramework, run: Run, steps: int) -> Engine:
    with run.monitor.phase("load", "actor"), framework.building(trains=True):
        model = build_policy(config, run.source, run.tokenizer, run.device, adapters=True)
    with run.monitor.phase("initialise", "actor"):
        return framework.trainable(model, optimizer_settings(run, run.stage.learning_rate, steps), "actor")


def _reference(config: Config, framework: EngineFramework, run: Run) -> Frozen:
    with run.monitor.phase("load", "reference"), framework.building(trains=False):
        model = build_policy(config, run.source, run.tokenizer, run.device, adapters=False)
    with run.monitor.phase("initialise", "reference"):
        return framework.frozen(model, run.stage.offload_reference)


def _reward(config: Config, framework: EngineFramework, run: Run) -> Reward:
    if config.reward.name == "function":
        assert config.reward.function is not None
        return FunctionReward(config.reward.function)
    path = config.reward.path
    with run.monitor.phase("load", "reward"), framework.building(trains=False):
        model = build_scalar(config, path, run.tokenizer, run.device, adapters=False, trained_head=True)
    with run.monitor.phase("initialise", "reward"):
        frozen = framework.frozen(model, config.reward.offload)
    return ModelReward(frozen, read_reward_statistics(path) if config.reward.normalise else None)


def _critic(config: Config, framework: EngineFramework, run: Run, steps: int) -> Engine:
    """From the reward model if there is one and it is wanted, otherwise from the actor's weights with a new head."""
    from_reward = config.reward.name == "model" and run.stage.critic_from_reward_model
    source = config.reward.path if from_reward else run.source
    with run.monitor.phase("load", "critic"), framework.building(trains=True):
        model = build_scalar(config, source, run.tokenizer, run.device, adapters=True, trained_head=from_reward)
    with run.monitor.phase("initialise", "critic"):
        return framework.trainable(model, optimizer_settings(run, run.stage.critic_learning_rate, steps), "critic")


@torch.no_grad()
def _require_equal(run: Run, critic: Engine, reward: Frozen) -> None:
    """The critic started from the reward model must answer like it (A48): a head lost in loading shows here."""
    tokens = torch.arange(5, 5 + 16, device=run.device).unsqueeze(0)
    probe = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    critic.module.eval()
    with reward.resident():
        difference = (critic(**probe) - reward(**probe)).abs().max().item()
    # ZeRO's fp32 master weights round back to the same 16-bit weights, so nothing but kernel choice may differ
    if difference > 1e-2:
        raise RuntimeError(
            f"the critic differs from the reward model it was loaded from by {difference:.3g} on a probe batch"
        )
