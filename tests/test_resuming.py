"""What a resumed run is run with, and what a new one refuses to write over."""

from __future__ import annotations

import pytest

from rlhf import resuming
from rlhf.config import ConfigError, to_yaml
from tests.configs import parsed


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(parsed("model=tiny", "stage=sft", "lora=qkv")))
    return tmp_path


def test_resume_alone_takes_the_stored_config(folder):
    config = resuming.stored(folder, str(folder), [f"resume={folder}", "hydra.verbose=true", "wandb.mode=online"])
    assert config is not None and config.lora.enabled and config.resume == str(folder)


def test_any_other_override_composes_anew(folder):
    assert resuming.stored(folder, str(folder), [f"resume={folder}", "zero=3"]) is None


def test_a_new_run_does_not_write_over_another(folder):
    with pytest.raises(ConfigError, match="already holds a run; write resume="):
        resuming.check(parsed("model=tiny", "stage=sft"), folder)


def test_a_changed_config_is_refused_with_each_difference(folder):
    config = parsed("model=tiny", "stage=sft", "lora=off", "zero=3", "stage.steps=7", "monitor.empty_cache=false")
    with pytest.raises(ConfigError) as refused:
        resuming.check(config.model_copy(update={"resume": str(folder)}), folder)
    (problem,) = refused.value.problems
    assert "lora.enabled was True and is now False" in problem
    assert "zero.zero_stage was 2 and is now 3" in problem
    assert "steps" not in problem and "monitor" not in problem


def test_the_same_config_goes_on(folder):
    config = parsed("model=tiny", "stage=sft", "lora=qkv")
    resuming.check(config.model_copy(update={"resume": str(folder)}), folder)


def test_what_an_earlier_stage_filled_in_is_no_difference(tmp_path):
    stored = parsed("model=tiny", "stage=ppo")
    reward = stored.reward.model_copy(update={"path": "/somewhere/rm/model"})
    ran = stored.for_stage(stored.stages[-1]).model_copy(update={"reward": reward})
    (tmp_path / "config.yaml").write_text(to_yaml(ran))
    resuming.check(parsed("model=tiny", "stage=ppo").model_copy(update={"resume": str(tmp_path)}), tmp_path)
