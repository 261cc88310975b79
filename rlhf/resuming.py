"""What a resumed run is run with, and what a new one must not write over. No torch here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.config import Config, ConfigError, from_yaml

# What stages fill in for those after them; the command line leaves it open again.
_FILLED_IN = ("reward.path", "stage.rm")
# What may change between an interrupted run and its continuation without changing what is trained.
_FREE_GROUPS = ("resume", "wandb", "monitor")
_FREE_FIELDS = (
    "steps",
    "epochs",
    "save_every",
    "keep_checkpoints",
    "eval_every",
    "sample_every",
    "timeout_minutes",
    "rendezvous",
)


def stored(folder: Path, resume: bool | str, overrides: Sequence[str]) -> Config | None:
    """The run's own config when nothing but `resume=` was given; None when the command line composes one.

    Overrides of Hydra's and W&B's settings count as nothing.
    """
    given = [o for o in overrides if not o.lstrip("+~").startswith(("resume=", "hydra.", "hydra/", "wandb."))]
    if given or not (folder / "config.yaml").is_file():
        return None
    return from_yaml(folder / "config.yaml").model_copy(update={"resume": resume})


def check(config: Config, folder: Path) -> None:
    """Raises ConfigError when `folder` holds a run that this one would write over, or continue as something else."""
    file = folder / "config.yaml"
    if not config.resume:
        # on several machines the others' parents may have been here first, for this very run
        if file.is_file() and config.hardware.nodes == 1:
            raise ConfigError(
                [f"{folder} already holds a run; write resume={folder} to go on with it, or another hydra.run.dir"]
            )
        return
    if not file.is_file():
        return
    before, now = from_yaml(file).model_dump(mode="json"), config.model_dump(mode="json")
    changed = [
        f"{name} was {old!r} and is now {new!r}"
        for name, old, new in _differences(before, now)
        if name.split(".")[0] not in _FREE_GROUPS
        and name.split(".")[-1] not in _FREE_FIELDS
        and not name.startswith(_FILLED_IN)
    ]
    if changed:
        raise ConfigError(
            [
                f"{folder} was started with another configuration: {'; '.join(changed)}. "
                f"Write resume={folder} alone to continue it as it was"
            ]
        )


def _differences(before: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield path, before, now
