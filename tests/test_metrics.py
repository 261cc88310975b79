"""The record: what is on disk is whole at any moment, in order, and readable by anybody."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

import rlhf.hydra_choices
import rlhf.metrics
from rlhf.config import Config, parse
from rlhf.metrics import Recorder, config_hash, environment, read_jsonl

ROOT = Path(__file__).parent.parent


def config(*overrides: str) -> Config:
    """What `train.py model=tiny hardware=cpu wandb.mode=disabled <overrides>` would run."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        composed = compose("train", ["model=tiny", "hardware=cpu", "wandb.mode=disabled", *overrides])
    return parse(composed)


def recorder(folder: Path, rank: int = 0) -> Recorder:
    return Recorder(folder, "ppo", config(), rank, "dschat")


def result(**fields) -> dict:
    return {"status": "ok", "steps": 2, "metrics": {"heldout_reward_after": 1.5}, "memory": {}, "error": None} | fields


def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    record = recorder(tmp_path)
    record.log(0, {"reward/heldout_mean": -1.0})
    record.log(1, {"reward/mean": torch.tensor(0.25), "skipped_steps": 3, "kl/signed": np.float32(0.5)})
    record.time(1, {"seconds": 2.0})
    record.samples(1, [{"prompt": "Hello?", "answer": "Ja, schön", "reward": 1.0}, {"prompt": "b", "answer": "c"}])
    record.event(1, "early_stop", reason="KL 12 is over kl_stop 10")
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
        '{"step": 0, "reward/heldout_mean": -1.0}',
        '{"step": 1, "reward/mean": 0.25, "skipped_steps": 3, "kl/signed": 0.5}',
        '{"step": 1, "event": "early_stop", "reason": "KL 12 is over kl_stop 10"}',
    ]
    record.event(1, "memory_warning", repeatable=False, message="grows")
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3, "another run of the same config need not grow"
    assert read_jsonl(tmp_path / "timing.jsonl") == [
        {"step": 1, "seconds": 2.0},
        {"step": 1, "event": "memory_warning", "message": "grows"},
    ]
    assert [row["answer"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["Ja, schön", "c"]


def test_numbers_that_json_lacks_stay_valid_json_and_read_back(tmp_path):
    recorder(tmp_path).log(1, {"loss": float("nan"), "ratio/max": float("inf"), "low": -torch.tensor(float("inf"))})

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": "nan", "ratio/max": "inf", "low": "-inf"}
    assert np.isnan(float(row["loss"])) and float(row["low"]) == -float("inf")


def test_a_step_never_goes_back(tmp_path):
    record = recorder(tmp_path)
    record.log(3, {"loss": 1.0})
    record.log(3, {"heldout/loss": 1.0})
    with pytest.raises(ValueError, match=r"step 3, so step 2 cannot"):
        record.log(2, {"loss": 1.0})
    with pytest.raises(ValueError, match=r"step 3, so step 2 cannot"):
        record.event(2, "warning")
    with pytest.raises(ValueError, match=r"step 3, so step 1 cannot"):
        recorder(tmp_path).log(1, {"loss": 1.0})
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2


def test_rewinding_leaves_what_an_uninterrupted_run_would_have_written(tmp_path):
    def steps(record: Recorder, first: int, last: int) -> None:
        for step in range(first, last + 1):
            record.log(step, {"loss": 1 / 3 / step, "é": 1e-300})
            record.time(step, {"seconds": 1.0})
            record.samples(step, [{"answer": "ö"}])

    steps(recorder(tmp_path / "whole"), 1, 6)
    steps(recorder(tmp_path / "resumed"), 1, 5)
    for name in ("metrics", "timing", "samples"):
        with open(tmp_path / "resumed" / f"{name}.jsonl", "ab") as stream:
            stream.write('{"step": 6, "é'.encode()[:-1])  # torn inside a character
    again = recorder(tmp_path / "resumed")
    again.rewind(3)
    steps(again, 4, 6)
    for name in ("metrics.jsonl", "timing.jsonl", "samples.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    again.rewind(-1)
    again.log(0, {"loss": 1.0})
    assert read_jsonl(tmp_path / "resumed" / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]


def test_a_kill_loses_nothing_that_was_logged(tmp_path):
    code = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from pathlib import Path
from test_metrics import recorder
record = recorder(Path({str(tmp_path)!r}))
for step in range(100):
    record.log(step, {{"loss": 1.0}})
print("logged", flush=True)
import time; time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "logged\n"
        process.send_signal(signal.SIGKILL)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(100))


def test_a_torn_last_line_is_skipped_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_jsonl(path) == []
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    recorder(tmp_path).log(2, {"loss": 1.0})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2, "loss": 1.0}]
    path.write_text('{"step": 1}\n{"step": 2, "lo\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is not JSON"):
        read_jsonl(path)


def test_other_ranks_write_nothing(tmp_path):
    record = recorder(tmp_path / "run", rank=1)
    record.log(2, {"loss": 1.0})
    record.log(1, {"loss": 1.0})
    record.time(1, {"seconds": 1.0})
    record.event(1, "warning")
    record.samples(1, [{"answer": "a"}])
    record.memory(1, {})
    record.rewind(0)
    record.finish(result())
    assert not (tmp_path / "run").exists()


def test_the_result_says_what_ran_where_and_on_what(tmp_path):
    record = recorder(tmp_path)
    record.log(1, {"reward/mean": 0.5, "reward/std": 0.1})
    record.finish(result(metrics={"heldout_loss": float("nan")}, memory={"measured": {"peak_bytes": 2**40}}))
    written = json.loads((tmp_path / "result.json").read_text())
    assert list(written) == [
        "stage", "framework", "versions", "device", "git_commit", "started", "wall_seconds", "seed", "config_hash",
        "status", "steps", "metrics", "memory", "error",
    ]  # fmt: skip
    assert written["status"] == "ok" and written["stage"] == "ppo" and written["framework"] == "dschat"
    assert written["metrics"] == {"heldout_loss": "nan"} and written["memory"]["measured"]["peak_bytes"] == 2**40
    assert written["versions"]["torch"] == torch.__version__ and written["versions"]["python"].startswith("3.")
    assert written["device"]["type"] == "cpu" and written["device"]["memory_bytes"] > 2**28
    assert written["started"].endswith("+00:00") and written["wall_seconds"] >= 0
    assert written["config_hash"] == config_hash(config())
    assert (tmp_path / "plots" / "reward.png").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "plots", "result.json"]


def test_a_status_outside_the_schema_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ok, interrupted, failed, oom, not 'done'"):
        recorder(tmp_path).finish(result(status="done"))


def test_a_plot_that_fails_does_not_cost_the_result(tmp_path, capsys):
    record = recorder(tmp_path)
    (tmp_path / "memory.jsonl").write_text('{"step": 1, "unknown": true}\n')
    record.finish(result())
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "ok"
    assert capsys.readouterr().err.startswith("The plots could not be drawn: KeyError")


def test_the_hash_follows_what_decides_the_numbers():
    same = {config_hash(config()), config_hash(config("wandb.name=x")), config_hash(config("resume=true"))}
    assert len(same) == 1 and config_hash(config("seed=1")) not in same


def test_the_commit_is_this_repositorys_or_none(tmp_path, monkeypatch):
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    expected = head.stdout.strip() if (ROOT / ".git").exists() else None
    assert environment("cpu")["git_commit"] == expected
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / "env" / "rlhf" / "metrics.py"  # installed inside somebody else's repository
    inside.parent.mkdir(parents=True)
    monkeypatch.setattr(rlhf.metrics, "__file__", str(inside))
    assert environment("cpu")["git_commit"] is None


def test_importing_the_record_imports_no_torch():
    code = "import sys, rlhf.metrics, rlhf.progress; print(sorted({'torch', 'wandb', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "[]\n"
