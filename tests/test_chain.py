from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

import rlhf.hydra_choices  # noqa: F401
from rlhf import chain, failures, files, launch
from rlhf.config import Config, ConfigError, from_yaml, parse

CONF = Path(__file__).parent.parent / "conf"


def config(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        given = ["model=tiny", "hardware=cpu", "hydra.run.dir=unused", "resume=unused", *overrides]
        return parse(compose("train", given))


def write_result(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    usual = {"status": "ok", "stage": folder.name, "wall_seconds": 2.0, "metrics": {}, "memory": {}, "error": None}
    files.write_json(folder / "result.json", usual | fields)


def test_all_feeds_each_stage_with_those_before(tmp_path: Path) -> None:
    whole = config("stage=all")
    sft, rm, ppo = whole.stages
    assert [chain.stage_folder(whole, stage, tmp_path) for stage in (sft, rm, ppo)] == [
        tmp_path / "sft",
        tmp_path / "rm",
        tmp_path / "ppo",
    ]
    first = chain.stage_config(whole, sft, tmp_path)
    assert first.model == whole.model and first.model.random_init
    for stage in (rm, ppo):
        model = chain.stage_config(whole, stage, tmp_path).model
        assert (model.path, model.random_init, model.gguf_file, model.package, model.tokenizer) == (
            str(tmp_path / "sft" / "model"),
            False,
            None,
            None,
            None,
        )
    assert chain.stage_config(whole, rm, tmp_path).reward.path is None
    assert chain.stage_config(whole, ppo, tmp_path).reward.path == str(tmp_path / "rm" / "model")


def test_weights_of_a_package_are_not_looked_for_in_a_trained_folder(tmp_path: Path) -> None:
    whole = config("stage=all", "model=smollm2_135m")
    assert whole.model.package and whole.model.gguf_file
    model = chain.stage_config(whole, whole.stages[2], tmp_path).model
    assert (model.package, model.gguf_file) == (None, None)


def test_ppo_trains_its_reward_model_beside_itself(tmp_path: Path) -> None:
    whole = config("stage=ppo")
    rm, ppo = whole.stages
    assert chain.stage_folder(whole, rm, tmp_path) == tmp_path / "rm"
    assert chain.stage_folder(whole, ppo, tmp_path) == tmp_path
    fed = chain.stage_config(whole, ppo, tmp_path)
    assert fed.reward.path == str(tmp_path / "rm" / "model")
    assert fed.model == whole.model
    assert fed.stages == (fed.stage,)


def test_a_reward_function_stays(tmp_path: Path) -> None:
    whole = config("stage=all", "reward=function")
    assert chain.stage_config(whole, whole.stages[2], tmp_path).reward == whole.reward


def test_prepare_forgets_the_attempt_before_and_keeps_the_rest(tmp_path: Path) -> None:
    write_result(tmp_path, status="failed")
    failures.clear(tmp_path)
    failures.write_heartbeat(tmp_path, 0, "update")
    failures.write_error(tmp_path, 0, RuntimeError("old"))
    kept = [tmp_path / "metrics.jsonl", tmp_path / "ranks" / "memory_1.jsonl", tmp_path / "ranks" / "rank_1.log"]
    for path in kept:
        path.touch()
    stage = config("stage=sft")
    for _ in range(2):  # as two machines do
        chain.prepare(stage, tmp_path)
    assert failures.errors(tmp_path) == [] and failures.heartbeats(tmp_path) == {} and chain.result(tmp_path) is None
    assert all(path.exists() for path in kept)
    assert from_yaml(tmp_path / "config.yaml") == stage
    assert not list(tmp_path.glob(".*"))


def test_sum_of_all_stages(tmp_path: Path) -> None:
    whole = config("stage=all")
    write_result(tmp_path / "sft", metrics={"heldout_loss": 1.0})
    write_result(tmp_path / "rm", metrics={"heldout_loss": 9.0, "rm_accuracy": 0.9})
    write_result(tmp_path / "ppo", metrics={"heldout_reward_after": 3.0}, memory={"measured": 7}, framework="dschat")
    chain.summarise(whole, tmp_path)
    found = chain.result(tmp_path)
    assert found is not None
    assert (found["status"], found["stage"], found["wall_seconds"]) == ("ok", "all", 6.0)
    assert found["metrics"] == {"heldout_loss": 1.0, "rm_accuracy": 0.9, "heldout_reward_after": 3.0}
    assert (found["framework"], found["memory"]) == ("dschat", {"measured": 7})
    assert found["stages"]["rm"] == chain.result(tmp_path / "rm")


@pytest.mark.parametrize(
    ("statuses", "total"),
    [
        (["ok", "oom"], "oom"),
        (["ok", "failed"], "failed"),
        (["failed"], "failed"),
        (["ok", "interrupted"], "interrupted"),
        (["ok", "ok"], "interrupted"),  # stopped between two stages
    ],
)
def test_status_is_the_worst(tmp_path: Path, statuses: list[str], total: str) -> None:
    whole = config("stage=all")
    for stage, status in zip(whole.stages, statuses, strict=False):
        write_result(tmp_path / stage.name, status=status)
    chain.summarise(whole, tmp_path)
    found = chain.result(tmp_path)
    assert found is not None and found["status"] == total
    done = [chain.finished(whole, stage, tmp_path) for stage in whole.stages]
    assert done == [status == "ok" for status in statuses] + [False] * (3 - len(statuses))


def test_the_sum_beside_ppo_can_be_made_twice(tmp_path: Path) -> None:
    whole = config("stage=ppo")
    _, ppo = whole.stages
    write_result(tmp_path / "rm", metrics={"rm_accuracy": 0.9})
    chain.summarise(whole, tmp_path)
    assert not chain.finished(whole, ppo, tmp_path)
    write_result(tmp_path, stage="ppo", metrics={"heldout_reward_after": 3.0})
    for _ in range(2):
        chain.summarise(whole, tmp_path)
        found = chain.result(tmp_path)
        assert found is not None
        assert (found["status"], found["stage"], found["wall_seconds"]) == ("ok", "ppo", 4.0)
        assert found["metrics"] == {"rm_accuracy": 0.9, "heldout_reward_after": 3.0}
        assert chain.finished(whole, ppo, tmp_path)


@pytest.mark.parametrize(
    ("code", "written", "error", "stopped", "left", "status"),
    [
        (0, "ok", None, 0, 0, "ok"),
        (0, "ok", None, 130, 0, "ok"),  # the signal came after the last step
        (0, "interrupted", None, 130, 130, "interrupted"),
        (0, "interrupted", None, 0, 143, "interrupted"),  # somebody signalled the ranks
        (-9, None, None, 143, 143, "interrupted"),  # killed by the second signal
        (0, None, None, 0, 1, "failed"),
        (1, None, RuntimeError("boom"), 0, 1, "failed"),
        (7, "ok", RuntimeError("boom"), 0, 1, "failed"),  # one rank failed after rank 0 had finished
        (3, None, RuntimeError("no memory"), 0, 3, "oom"),
        (1, "oom", RuntimeError("no memory"), 0, 3, "oom"),
    ],
)
def test_exit_code_and_result(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    written: str | None,
    error: Exception | None,
    stopped: int,
    left: int,
    status: str,
) -> None:
    failures.clear(tmp_path)
    if written:
        write_result(tmp_path, status=written, metrics={"loss": 1.0})
    if error:
        failures.write_error(tmp_path, 1, error)
    assert launch.conclude(config("stage=sft"), tmp_path, code, 5.0, stopped) == left
    found = chain.result(tmp_path)
    assert found is not None
    assert (found["status"], found["metrics"]) == (status, {"loss": 1.0} if written else {})
    shown = capsys.readouterr().err
    assert bool(shown) == (status in ("failed", "oom"))
    if error:
        assert (found["error"]["rank"], found["error"]["message"]) == (1, str(error))
        assert f"RuntimeError: {error}" in shown


def test_a_ranks_config_error_is_raised_again(tmp_path: Path) -> None:
    failures.clear(tmp_path)
    failures.write_error(tmp_path, 0, ConfigError(["One sentence.", "Another."]))
    with pytest.raises(ConfigError) as caught:
        launch.conclude(config("stage=sft"), tmp_path, 2, 5.0, 0)
    assert caught.value.problems == ["One sentence.", "Another."]
    found = chain.result(tmp_path)
    assert found is not None and found["status"] == "failed"
