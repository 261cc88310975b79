"""Where a run writes: what `${run_folder:${resume}}` in conf/train.yaml stands for."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from rlhf.config import ConfigError

OUTPUTS = Path("outputs")


def run_folder(resume: bool | str) -> str:
    """A new folder, made here so that no other run gets it; or the one to go on with. Raises ConfigError."""
    if resume is False:
        return str(_new())
    if resume is True:
        unfinished = [folder for folder in _runs() if not _finished(folder)]
        if not unfinished:
            raise ConfigError(
                [f"resume=true finds no unfinished run under {OUTPUTS.absolute()}; write resume=<folder of the run>"]
            )
        return str(unfinished[-1])
    folder = Path(str(resume))
    if not _holds_run(folder):
        raise ConfigError([f"resume={resume} is not the folder of a run: there is no config.yaml; write one that is"])
    return str(folder)


def _new() -> Path:
    now = datetime.datetime.now()
    day = OUTPUTS / f"{now:%Y-%m-%d}"
    day.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = day / (f"{now:%H-%M-%S}" + (f"_{number}" if number > 1 else ""))
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # another run of the same second
            number += 1


def _runs() -> list[Path]:
    """Oldest first."""
    runs = [folder for folder in OUTPUTS.glob("*/*") if _holds_run(folder)]
    return sorted(runs, key=lambda folder: (folder.parent.name, folder.name[:8], len(folder.name), folder.name))


def _holds_run(folder: Path) -> bool:
    """stage=all has a config.yaml per stage."""
    return (folder / "config.yaml").is_file() or any(folder.glob("*/config.yaml"))


def _finished(folder: Path) -> bool:
    try:
        return json.loads((folder / "result.json").read_text())["status"] == "ok"
    except (OSError, ValueError, KeyError):
        return False
