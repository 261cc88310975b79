"""The typed, frozen configuration. No torch here: a wrong config must be refused before anything heavy is imported.

Hydra composes `conf/`; `parse` turns the result into a `Config` or raises `ConfigError` with every problem at once.
Defaults live in `conf/` alone, so every field below is required. Derived numbers are properties.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from omegaconf import DictConfig
from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from rlhf.hardware import Machine

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(Exception):
    """What the user gave cannot run. `problems` holds one finished sentence per problem."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


class Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class FrameworkConfig(Group):
    """framework=: the sizes are elements, with DeepSpeed's names."""

    name: Literal["dschat"]
    allgather_bucket_size: PositiveInt
    reduce_bucket_size: PositiveInt
    overlap_comm: bool


class ZeroConfig(Group):
    """zero=: `zero_stage` is ZeRO's number. Offload puts optimizer states or parameters into host memory."""

    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    offload_parameters: bool
    # ZeRO-3 only: gather all weights once per rollout instead of once per token (A15). None: when they fit.
    gather_for_generation: bool | None


class LoraConfig(Group):
    """lora=: `targets` is qkv, all, or a list of module names; alpha None means rank / 2 (article C5)."""

    enabled: bool
    rank: PositiveInt
    alpha: PositiveFloat | None
    dropout: Share
    targets: Literal["qkv", "all"] | tuple[str, ...]
    learning_rate: PositiveFloat | None  # of all adapters; None: each role's own (A24)

    @property
    def scaling_alpha(self) -> float:
        return self.alpha if self.alpha is not None else self.rank / 2


class PrecisionConfig(Group):
    """precision=: `clip_grad_norm` 0 turns clipping off; `loss_scale` 0 means dynamic (fp16 only)."""

    dtype: Literal["fp32", "fp16", "bf16"]
    tf32: bool
    clip_grad_norm: NonNegativeFloat
    loss_scale: NonNegativeFloat
    initial_scale_power: NonNegativeInt
    # Stop with advice after this many overflowing steps in a row (A27).
    max_skipped_steps: PositiveInt


class HardwareConfig(Group):
    """hardware=: what the job runs on. None in `device`, `devices`: look at this machine."""

    name: str
    device: Literal["cpu", "cuda"] | None
    devices: PositiveInt | None  # per node: GPUs, or processes on CPU
    nodes: PositiveInt
    rendezvous: str | None  # host:port of one node, the same on all, when nodes > 1
    device_memory_gib: PositiveFloat | None
    host_memory_gib: PositiveFloat | None
    compute_capability: PositiveFloat | None
    # A rank that waits longer than this for the others gives up, naming every rank's phase (A16).
    timeout_minutes: PositiveFloat

    @property
    def ranks(self) -> int:
        assert self.devices is not None, "parse() fills it"
        return self.devices * self.nodes


class ModelShape(Group):
    """What memory depends on, so that planning needs no download. `family` is transformers' model_type."""

    family: str
    layers: PositiveInt
    hidden: PositiveInt
    intermediate: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    vocabulary: PositiveInt
    max_length: PositiveInt
    gated_mlp: bool
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool


class ModelConfig(Group):
    """model=: `path` is a hub name or a folder. `random_init` builds `shape` (transformers' config), weights random."""

    name: str
    path: str | None
    gguf_file: str | None  # the weights are this file in `path`
    package: str | None  # the weights are in this installed Python package
    tokenizer: str | None  # None: the one beside the weights
    random_init: bool
    shape: ModelShape | None
    pad_token: str | None
    eos_token: str | None
    chat_template: str | None
    attention: Literal["sdpa", "eager", "flash_attention_2"]
    gradient_checkpointing: bool
    trust_remote_code: bool


class DataConfig(Group):
    """data=: three sources, each a .jsonl/.parquet file, a folder of them, or a hub data set (`name`, `name:config`
    or `name:config:split`, where the split is `train` when left out).

    Held-out rows come from `*_heldout` when given, otherwise `heldout_fraction` of the rows is put aside.
    Lengths are tokens; a prompt longer than `max_prompt_length` is dropped and counted (A40).
    """

    name: str
    sft: str | None
    sft_heldout: str | None
    preferences: str | None
    preferences_heldout: str | None
    prompts: str | None
    prompts_heldout: str | None
    heldout_fraction: Share
    prompt_column: str
    answer_column: str
    chosen_column: str
    rejected_column: str
    system: str | None  # system message of the chat template; None leaves it to the template
    use_chat_template: bool
    max_prompt_length: PositiveInt
    max_answer_length: PositiveInt
    cache: str | None  # folder; None: no cache

    @property
    def max_length(self) -> int:
        return self.max_prompt_length + self.max_answer_length


class RewardConfig(Group):
    """reward=: a reward model (`path`: folder of a stage=rm run, or any sequence classifier) or a Python function.

    A function is `f(prompts: list[str], answers: list[str]) -> list[float]`, given as pkg.mod.name.
    """

    name: Literal["model", "function"]
    path: str | None
    function: str | None
    normalise: bool  # apply the z-score statistics saved with the reward model (article C10)
    clamp: PositiveFloat | None  # scores are cut to [-clamp, clamp]
    offload: bool  # keep the reward model in host memory outside the score phase


class StageBase(Group):
    """total_batch = micro_batch x ranks x accumulation, in samples per optimizer step; give two, the third follows."""

    total_batch: PositiveInt | None
    micro_batch: PositiveInt | None
    accumulation: PositiveInt | None
    learning_rate: PositiveFloat
    betas: tuple[Share, Share]
    weight_decay: NonNegativeFloat
    schedule: Literal["cosine", "linear", "constant"]
    warmup_steps: NonNegativeInt
    eval_every: NonNegativeInt  # steps; 0: only before and after training
    eval_samples: PositiveInt | None  # None: all held-out rows
    save_every: NonNegativeInt  # steps; 0: only when the run is stopped
    keep_checkpoints: PositiveInt
    sample_every: NonNegativeInt  # steps between tables of samples (A32); 0: only before and after


class SftConfig(StageBase):
    name: Literal["sft"]
    epochs: PositiveInt
    steps: PositiveInt | None  # None: as many as `epochs` gives
    packing: bool


class RmConfig(StageBase):
    name: Literal["rm"]
    epochs: PositiveInt
    steps: PositiveInt | None
    save_reward_statistics: bool  # mean and deviation of the reward over the training set (article C10)
    statistics_samples: PositiveInt | None  # pairs they are taken over; None: all of the training set


class PpoConfig(StageBase):
    """One step is one rollout of `rollout_batch` answers and the updates on it."""

    name: Literal["ppo"]
    steps: PositiveInt
    rollout_batch: PositiveInt  # answers per rollout, over all ranks
    rollout_micro_batch: PositiveInt | None  # rows generated and scored at once on one rank; None: all of its rows
    ppo_epochs: PositiveInt
    critic_learning_rate: PositiveFloat
    critic_warmup_steps: NonNegativeInt  # rollouts in which only the critic learns
    critic_from_reward_model: bool
    temperature: PositiveFloat
    top_p: Fraction
    top_k: NonNegativeInt
    kl_coefficient: NonNegativeFloat
    kl_target: PositiveFloat | None  # None: fixed coefficient, otherwise adaptive
    kl_horizon: PositiveInt
    kl_stop: PositiveFloat | None  # mean KL per answer beyond which training stops (A34)
    gamma: Fraction
    gae_lambda: Fraction
    whiten_advantages: bool
    clip_ratio: PositiveFloat
    clip_value: PositiveFloat | None
    entropy_coefficient: NonNegativeFloat
    ptx_coefficient: NonNegativeFloat  # share of the SFT loss mixed into the actor's
    ema_decay: Share  # 0: no moving average of the actor
    # What to do with an answer that reached the length limit without an end token.
    truncated_answers: Literal["keep", "penalise", "mask"]
    truncation_penalty: NonNegativeFloat
    offload_reference: bool
    # How the reward model is trained first when reward.path is null; None in stage=all, which has its own.
    rm: RmConfig | None


AnyStage = SftConfig | RmConfig | PpoConfig


class AllConfig(Group):
    """The three in order, each fed by the one before."""

    name: Literal["all"]
    sft: SftConfig
    rm: RmConfig
    ppo: PpoConfig


class MonitorConfig(Group):
    """NVML is sampled every `sample_seconds`; `empty_cache` frees the allocator's cache between phases."""

    sample_seconds: PositiveFloat
    empty_cache: bool
    growth_warning_mib: PositiveFloat  # per step, at a fixed phase boundary (A07)


class WandbConfig(Group):
    mode: Literal["online", "offline", "disabled"]
    project: str
    entity: str | None
    group: str | None
    name: str | None
    tags: tuple[str, ...]


class Config(Group):
    framework: FrameworkConfig
    stage: Annotated[AnyStage | AllConfig, Field(discriminator="name")]
    zero: ZeroConfig
    lora: LoraConfig
    precision: PrecisionConfig
    hardware: HardwareConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig
    monitor: MonitorConfig
    wandb: WandbConfig
    seed: NonNegativeInt
    resume: bool | str
    experiment: str | None

    @property
    def stages(self) -> tuple[AnyStage, ...]:
        """The stages to run, in this order."""
        return tuple(stages_with_paths(self.stage, self.reward).values())

    def for_stage(self, stage: AnyStage) -> Config:
        """This config with `stage`, one of `stages`, as the only one to run."""
        if isinstance(stage, PpoConfig):
            stage = stage.model_copy(update={"rm": None})
        return self.model_copy(update={"stage": stage})

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about what can run but is probably not meant."""
        from rlhf import rules  # it needs the classes above

        return tuple(rules.warnings(self))


def stages_with_paths(stage: AnyStage | AllConfig, reward: RewardConfig) -> dict[str, AnyStage]:
    """The stages that will run, in order, by the path under which the user sets them.

    PPO without a reward model trains one first.
    """
    if isinstance(stage, AllConfig):
        return {"stage.sft": stage.sft, "stage.rm": stage.rm, "stage.ppo": stage.ppo}
    if isinstance(stage, PpoConfig) and stage.rm is not None and reward.name == "model" and reward.path is None:
        return {"stage.rm": stage.rm, "stage": stage}
    return {"stage": stage}


def parse(
    cfg: DictConfig | dict[str, Any],
    *,
    machine: Machine | None = None,
    training: bool = True,
    folder_given: bool = True,
) -> Config:
    """Check what Hydra composed and fill in what it leaves open: the hardware found, the batch that follows.

    `machine` None is this one. `training` False is for plans: the hardware and the files named need not be here.
    `folder_given`: the user chose the run's folder. Raises ConfigError with every problem of every group.
    """
    from rlhf import batch, hardware, rules, validation  # they need the classes above

    groups, problems = validation.groups(validation.plain(cfg))
    machine = machine or hardware.detect()
    if "hardware" in groups:
        groups["hardware"] = hardware.fill(groups["hardware"], machine)
    if {"stage", "hardware", "reward"} <= groups.keys():
        groups["stage"], contradictions = batch.fill(groups["stage"], groups["reward"], groups["hardware"].ranks)
        problems += contradictions
    problems += rules.problems(groups, rules.Setting(machine, training, folder_given))
    if problems:
        raise ConfigError(problems)
    return Config(**groups)


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def from_yaml(path: Path) -> Config:
    """What `to_yaml` wrote, as it was: nothing is detected or derived again. Raises ConfigError."""
    from rlhf import validation  # it needs the classes above

    groups, problems = validation.groups(yaml.safe_load(path.read_text()))
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return Config(**groups)
