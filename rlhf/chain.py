"""The stages of one run: where each one lives, what it gets from those before, and how their results sum up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf import failures, files
from rlhf.config import AnyStage, Config, to_yaml
from rlhf.outcome import STATUSES


def stage_folder(config: Config, stage: AnyStage, folder: Path) -> Path:
    """The run's own folder for the stage that the user named, a folder beside its files for any other."""
    return folder if stage.name == config.stage.name else folder / stage.name


def stage_config(config: Config, stage: AnyStage, folder: Path) -> Config:
    """What this stage is run with: the model and the reward model of the stages before it put in."""
    alone = config.for_stage(stage)
    for earlier in config.stages[: config.stages.index(stage)]:
        trained = str((stage_folder(config, earlier, folder) / "model").resolve())
        if earlier.name == "sft":
            given = {"path": trained, "tokenizer": None, "gguf_file": None, "package": None, "random_init": False}
            alone = alone.model_copy(update={"model": alone.model.model_copy(update=given)})
        elif earlier.name == "rm" and alone.reward.name == "model" and alone.reward.path is None:
            alone = alone.model_copy(update={"reward": alone.reward.model_copy(update={"path": trained})})
    return alone


def prepare(config: Config, folder: Path) -> None:
    """Make the folder of a stage ready for an attempt. On several machines every one does this, with the same content.

    They all have done so before the first rank starts, since ranks wait for one another.
    """
    failures.clear(folder)
    (folder / "result.json").unlink(missing_ok=True)
    files.write_text(folder / "config.yaml", to_yaml(config))


def result(folder: Path) -> dict[str, Any] | None:
    return files.read_json(folder / "result.json")


def finished(config: Config, stage: AnyStage, folder: Path) -> bool:
    """Whether an earlier attempt completed this stage."""
    found = _own_result(stage, stage_folder(config, stage, folder))
    return found is not None and found["status"] == "ok"


def _own_result(stage: AnyStage, folder: Path) -> dict[str, Any] | None:
    """The result that the stage itself wrote, also after `summarise` has put the sum in its place."""
    found = result(folder)
    if found is not None and "stages" in found:
        return found["stages"].get(stage.name)
    return found


def close(config: Config, folder: Path, status: str, seconds: float) -> None:
    """See to it that result.json says `status`, and what failed: ranks that were killed could not write it."""
    found = result(folder) or {
        "stage": config.stage.name,
        "framework": config.framework.name,
        "wall_seconds": seconds,
        "metrics": {},
        "memory": {"predicted": None, "measured": None},
    }
    found["status"] = status
    errors = failures.errors(folder)
    if errors and status != "interrupted":
        found["error"] = {key: errors[0].get(key) for key in ("rank", "step", "phase", "role", "type", "message")}
    files.write_json(folder / "result.json", found)


def summarise(config: Config, folder: Path) -> None:
    """Write <folder>/result.json for a run of several stages: the last stage's, with these put over it.

    `status` is the worst, `wall_seconds` the sum, `stages` holds each stage's result, and `metrics` those of all. Of a
    name that several have, such as heldout_loss, `metrics` holds the first stage's.
    """
    results = dict[str, dict[str, Any]]()
    for stage in config.stages:
        found = _own_result(stage, stage_folder(config, stage, folder))
        if found is not None:
            results[stage.name] = found
    if not results:
        return
    complete = len(results) == len(config.stages)
    statuses = [found["status"] for found in results.values()] + ([] if complete else ["interrupted"])
    metrics = dict[str, Any]()
    for found in results.values():
        metrics = found["metrics"] | metrics
    last = list(results.values())[-1]
    over = {
        "status": max(statuses, key=STATUSES.index),
        "stage": config.stage.name,
        "wall_seconds": sum(found["wall_seconds"] for found in results.values()),
        "metrics": metrics,
        "stages": results,
    }
    files.write_json(folder / "result.json", last | over)
