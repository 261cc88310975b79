"""Runs that are killed, stopped or find a damaged checkpoint, and go on as if nothing had been: real processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.configs import ROOT

pytestmark = pytest.mark.timeout(280)

STEPS = 7
COMMON = (
    "model=tiny",
    "hardware=cpu",
    "precision=fp32",
    "wandb.mode=disabled",
    "data.use_chat_template=false",
    "data.system=null",
    "data.max_prompt_length=10",
    "data.max_answer_length=8",
)
BATCH = ("warmup_steps=0", "learning_rate=1e-3", "total_batch=4", "micro_batch=2", f"steps={STEPS}", "save_every=2")
PPO = ("rollout_batch=4", "ema_decay=0.9", "kl_target=0.05", "sample_every=1", "eval_every=3")


def of_stage(path: str, *settings: str) -> list[str]:
    return [f"{path}.{setting}" for setting in settings]


STAGES = {
    "sft": ["stage=sft", "lora=qkv", *of_stage("stage", *BATCH)],
    "rm": ["stage=rm", *of_stage("stage", *BATCH, "eval_every=3")],
    "ppo": ["stage=ppo", "reward=function", *of_stage("stage", *BATCH, *PPO)],
    "ppo-2": ["stage=ppo", "zero=3", "reward=function", "hardware.devices=2", *of_stage("stage", *BATCH, *PPO)],
    "all": [
        "stage=all",
        *of_stage("stage.sft", *BATCH),
        *of_stage("stage.rm", *BATCH),
        *of_stage("stage.ppo", *BATCH, "rollout_batch=4"),
    ],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)

    def text(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(3, 7)))

    columns = {"sft": ("prompt", "answer"), "preferences": ("prompt", "chosen", "rejected"), "prompts": ("prompt",)}
    settings = [f"data.cache={folder}/cache"]
    for kind, names in columns.items():
        for name, rows in ((kind, 12), (f"{kind}_heldout", 3)):
            file = folder / f"{name}.jsonl"
            file.write_text(
                "".join(json.dumps({column: text("abcxyz") for column in names}) + "\n" for _ in range(rows))
            )
            settings.append(f"data.{name}={file}")
    return settings


@dataclass
class Train:
    """python train.py for one folder."""

    folder: Path
    settings: list[str]

    def start(self, *more: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "train.py"), *COMMON, *self.settings, *more]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return subprocess.Popen(
            [*command, f"hydra.run.dir={self.folder}"],
            cwd=ROOT,
            env=env | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def whole(self, *more: str) -> str:
        process = self.start(*more)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def resumed(self) -> str:
        return self.whole(f"resume={self.folder}")

    def kill_at(self, moment: Callable[[], bool]) -> None:
        """SIGKILL to every process of the run, as soon as `moment()`. The kernel kills ranks with their parent."""
        process = self.start()
        try:
            while not moment():  # it may last a few milliseconds, so no sleep; pytest's timeout ends it
                assert process.poll() is None, process.communicate()[0]
            for pid in children(process.pid):
                os.kill(pid, signal.SIGKILL)
        finally:
            process.kill()
            process.communicate()

    def wait_for(self, process: subprocess.Popen[str], moment: Callable[[], bool]) -> None:
        while not moment():  # pytest's timeout ends it
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.002)

    def rows(self, name: str = "metrics.jsonl") -> list[dict]:
        path = self.folder / name
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until_dead(run: Train) -> None:
    for beat in run.folder.rglob("ranks/rank_*.json"):
        pid = json.loads(beat.read_text())["pid"]
        while (status := Path(f"/proc/{pid}/stat")).exists() and status.read_text().split(")")[-1].split()[0] != "Z":
            time.sleep(0.01)


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data) -> Callable[[str], Train]:
    """The run of a name in STAGES that nothing happened to; each is made once."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    made: dict[str, Train] = {}

    def get(name: str) -> Train:
        if name not in made:
            run = Train(folder / name, STAGES[name] + data)
            run.whole()
            made[name] = run
        return made[name]

    return get


def require_equal(run: Train, expected: Train) -> None:
    """Byte for byte: the record, the samples, and every model saved."""
    weights = [path.relative_to(expected.folder) for path in expected.folder.rglob("*.safetensors")]
    models = [path for path in weights if "checkpoints" not in path.parts]
    assert any(path.parts[-2:] == ("model", "model.safetensors") for path in models)
    records = [path.relative_to(expected.folder) for path in expected.folder.rglob("metrics.jsonl")]
    records += [path.relative_to(expected.folder) for path in expected.folder.rglob("samples.jsonl")]
    for path in records + models:
        assert (run.folder / path).read_bytes() == (expected.folder / path).read_bytes(), path


def mid_step(run: Train) -> Callable[[], bool]:
    """Step 5 is recorded and step 6 on its way: after the checkpoint of step 4."""
    return lambda: any(row["step"] == 5 for row in run.rows())


@pytest.mark.parametrize("name", ["sft", "rm", "ppo", "ppo-2"])
def test_killed_and_resumed_is_as_uninterrupted(tmp_path, data, uninterrupted, name) -> None:
    run = Train(tmp_path / "run", STAGES[name] + data)
    run.kill_at(mid_step(run))
    wait_until_dead(run)
    assert not (run.folder / "result.json").exists()
    assert (run.folder / "checkpoints" / "step_00000004" / "manifest.json").exists()
    assert "resumed after step" in run.resumed()
    require_equal(run, uninterrupted(name))


# Python runs it at its start. A real SIGKILL, at a moment that no other process could hit reliably.
DIE_WHILE_SAVING = """
import os, pathlib, signal
rename = pathlib.Path.rename
def die(self, target):
    if self.name == "step_00000004.part":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.rename = die
"""


@pytest.mark.parametrize("name", ["sft", "rm", "ppo"])
def test_killed_while_saving_goes_on_from_the_checkpoint_before(tmp_path, data, uninterrupted, name) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIE_WHILE_SAVING)
    run = Train(tmp_path / "run", STAGES[name] + data)
    process = run.start(PYTHONPATH=str(tmp_path))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1 and "SIGKILL" in output, output
    found = {path.name for path in (run.folder / "checkpoints").iterdir()}
    best = {"step_00000003"} if name == "ppo" else set()  # of the held-out prompts, seen every third step
    assert found == {"step_00000002", "step_00000004.part"} | best
    assert f"resumed after step {3 if best else 2}" in run.resumed()
    require_equal(run, uninterrupted(name))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, data, uninterrupted, damage) -> None:
    expected = uninterrupted("rm")
    run = Train(tmp_path / "run", expected.settings)
    shutil.copytree(expected.folder, run.folder)
    (run.folder / "result.json").unlink()
    checkpoints = run.folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000004", "step_00000006"]
    largest = max(
        (p for p in (checkpoints / "step_00000006").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    damage(largest)
    output = run.resumed()
    assert "skipped checkpoint step_00000006" in output and "changed or cut" in output
    assert "resumed after step 4" in output
    require_equal(run, expected)


def test_sigterm_saves_and_resumes(tmp_path, data, uninterrupted) -> None:
    run = Train(tmp_path / "run", [*STAGES["sft"], *data, "stage.save_every=0"])
    process = run.start()
    run.wait_for(process, lambda: any(row["step"] == 2 and "loss" in row for row in run.rows()))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    result = json.loads((run.folder / "result.json").read_text())
    assert result["status"] == "interrupted" and 2 <= result["steps"] < STEPS
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{result['steps']:08d}"
    assert f"resumed after step {result['steps']}" in run.resumed()
    require_equal(run, uninterrupted("sft"))


def test_all_goes_on_in_the_stage_that_was_killed(tmp_path, data, uninterrupted) -> None:
    run = Train(tmp_path / "run", STAGES["all"] + data)
    rm = Train(run.folder / "rm", [])
    run.kill_at(mid_step(rm))
    wait_until_dead(rm)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (run.folder / "sft").rglob("*")}
    assert len(before) > 10 and not (run.folder / "ppo").exists()
    output = run.resumed()
    assert "Stage sft is complete" in output
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (run.folder / "sft").rglob("*")} == before
    require_equal(run, uninterrupted("all"))
