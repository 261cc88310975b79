"""Trains what conf/ and the command line describe: python train.py stage=ppo zero=2. See --help.

The only process that Hydra composes in. It checks the whole configuration, and imports no torch.
Exit codes: 0 ok, 1 failed, 2 the configuration is refused, 3 out of memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf import command_line, resuming, sweep
from rlhf.config import ConfigError, parse
from rlhf.outcome import FAILED, INTERRUPTED
from rlhf.run_folder import run_folder

OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)


def train(cfg: DictConfig, folder: Path, is_cell: bool, folder_given: bool) -> int:
    """Check and run one configuration; returns the exit code. Whatever goes wrong has been printed."""
    try:
        overrides = HydraConfig.get().overrides.task
        config = resuming.stored(folder, cfg.resume, overrides) if cfg.resume else None
        config = config or parse(cfg, folder_given=folder_given)
        from rlhf import launch  # after the check: a wrong configuration is refused in a moment

        command_line.tell(config.warnings)
        return launch.run(config, folder)
    except ConfigError as error:
        if is_cell:
            sweep.write_refusal(folder, error)
        return command_line.refuse(error)
    except Exception:
        traceback.print_exc()
        return FAILED


@hydra.main(config_path="conf", config_name="train", version_base="1.3")
def main(cfg: DictConfig) -> int:
    """A run exits with its code. A cell of a sweep returns it, so that the next cell starts."""
    settings = HydraConfig.get()
    is_cell = settings.mode == RunMode.MULTIRUN
    written = OmegaConf.to_yaml(settings.sweep if is_cell else settings.run, resolve=False)
    folder_given = isinstance(cfg.resume, str) or not re.search(r"\$\{(run_folder|now):", written)
    code = train(cfg, Path(settings.runtime.output_dir), is_cell, folder_given)
    if not is_cell or code in INTERRUPTED:
        sys.exit(code)
    return code


if __name__ == "__main__":
    sys.exit(command_line.run(main))
