"""What Hydra composes from conf/, for the tests of the configuration."""

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from rlhf import hydra_choices as hydra_choices  # zero=2
from rlhf.config import Config, ConfigError, parse
from rlhf.hardware import Gpu, Machine

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
GIB = 2**30
CPU = Machine(gpus=(), host_memory_bytes=16 * GIB)


def machine(gpus: int, memory_gib: float = 80.0, compute_capability: float = 8.0) -> Machine:
    gpu = Gpu("GPU-0", "test", int(memory_gib * GIB), compute_capability)
    return Machine(gpus=(gpu,) * gpus, host_memory_bytes=512 * GIB)


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


def parsed(*overrides: str, on: Machine = CPU, training: bool = True, folder_given: bool = True) -> Config:
    return parse(composed(*overrides), machine=on, training=training, folder_given=folder_given)


def problems(*overrides: str, on: Machine = CPU, training: bool = True, folder_given: bool = True) -> list[str]:
    """The sentences with which `overrides` are refused; none when they are not."""
    return refusals(composed(*overrides), on, training, folder_given)


def plain(cfg: Any) -> dict[str, Any]:
    return cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg)  # type: ignore[return-value]


def refusals(
    cfg: DictConfig | dict[str, Any], on: Machine = CPU, training: bool = True, folder_given: bool = True
) -> list[str]:
    try:
        parse(cfg, machine=on, training=training, folder_given=folder_given)
    except ConfigError as error:
        return error.problems
    return []


def with_option(cfg: DictConfig | dict[str, Any], group: str, option: str) -> dict[str, Any]:
    """What composing anew with group=option gives (for options without a defaults list), in a tenth of the time."""
    return {**plain(cfg), group: plain(OmegaConf.load(CONF / group / f"{option}.yaml"))}


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))
