"""W&B gets a copy of the record, and whatever happens to it, training goes on. Each run is a process of its own."""

import importlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_metrics import ROOT, config

import rlhf.tracking
from rlhf.metrics import read_jsonl
from rlhf.tracking import Tracker, group_of

RUN = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import rlhf.tracking
from rlhf.metrics import Recorder
from test_metrics import config, result
rlhf.tracking.INIT_SECONDS, rlhf.tracking.CLOSE_SECONDS = {seconds}
record = Recorder(Path({folder!r}), "ppo", config("wandb.mode={mode}"), 0, "dschat")
for step in range(1, 101):
    record.log(step, {{"reward/mean": step / 100, "reward/std": 0.5, "loss/actor": float("nan")}})
    record.time(step, {{"tokens_per_second": 1000.0}})
record.memory(100, {{"update": {{"actor": {{"allocated_bytes": 2**29, "seconds": 1.0}}}}}})
record.samples(100, [{{"prompt": "Hello?", "answer": "Yes"}}, {{"prompt": "Why?", "answer": "So", "reward": 1.0}}])
record.finish(result())
"""


def run(folder: Path, mode: str, seconds: tuple[float, float] = (60, 60), **variables: str) -> list[str]:
    """Record a whole run; returns the lines that the process printed. A process that hangs fails the test."""
    path = [str(ROOT), str(ROOT / "tests")]
    code = RUN.format(path=path, folder=str(folder), mode=mode, seconds=seconds)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=180, check=True,
    )  # fmt: skip
    assert len(read_jsonl(folder / "metrics.jsonl")) == 100
    assert json.loads((folder / "result.json").read_text())["status"] == "ok"
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def offline(tmp_path_factory) -> SimpleNamespace:
    """One offline run, the part of a sweep."""
    root = tmp_path_factory.mktemp("offline")
    folder = root / "multirun" / "0" / "ppo"
    folder.parent.mkdir(parents=True)
    (root / "multirun" / "multirun.yaml").touch()
    (root / "home").mkdir()
    printed = run(folder, "offline", HOME=str(root / "home"))
    (files,) = folder.glob("wandb/offline-run-*/files")
    return SimpleNamespace(root=root, folder=folder, files=files, printed=printed, records=records(folder))


def records(folder: Path) -> list:
    """The protobuf records of the one .wandb file below `folder`.

    It is a LevelDB log: blocks of 32 KiB, the first with a header of 7 bytes, made of fragments that begin with
    checksum (4 bytes), length (2) and type (1: a whole record; 2, 3, 4: first, middle, last part of one).
    """
    Record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block that cannot hold a header is padding
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(all_records: list) -> list[dict]:
    return [values(record.history.item) for record in all_records if record.HasField("history")]


def values(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def test_an_offline_run_holds_what_the_record_holds(offline):
    rows = history(offline.records)
    rewards = {row["ppo/step"]: row["ppo/reward/mean"] for row in rows if "ppo/reward/mean" in row}
    assert rewards == {row["step"]: row["reward/mean"] for row in read_jsonl(offline.folder / "metrics.jsonl")}
    assert len(rewards) == 100
    assert sum(row.get("ppo/time/tokens_per_second") == 1000.0 for row in rows) == 100
    (memory,) = [row for row in rows if any("memory" in name for name in row)]
    assert {name: memory[name] for name in memory if not name.startswith("_")} == {
        "ppo/step": 100, "ppo/memory/update/actor/allocated_gib": 0.5,
    }  # fmt: skip
    summary = {name: value for record in offline.records for name, value in values(record.summary.update).items()}
    assert summary["ppo/final/heldout_reward_after"] == 1.5


def test_samples_and_plots_are_sent(offline):
    rows = history(offline.records)
    (table,) = [row["ppo/samples/path"] for row in rows if "ppo/samples/path" in row]
    sent = json.loads((offline.files / table).read_text())
    assert sent["columns"] == ["prompt", "answer", "reward"]
    assert sent["data"] == [["Hello?", "Yes", None], ["Why?", "So", 1.0]]
    (plot,) = [row["ppo/plots/reward/path"] for row in rows if "ppo/plots/reward/path" in row]
    picture = (offline.folder / "plots" / "reward.png").read_bytes()
    assert (offline.files / plot).read_bytes() == picture


def test_every_name_is_drawn_over_the_steps_of_its_stage(offline):
    metrics = [record.metric for record in offline.records if record.HasField("metric")]
    assert {m.glob_name or m.name: m.step_metric for m in metrics} == {"ppo/step": "", "ppo/*": "ppo/step"}
    assert all("ppo/step" in row for row in history(offline.records))


def test_a_run_knows_its_sweep_and_its_config(offline):
    (start,) = [record.run for record in offline.records if record.HasField("run")]
    group = f"{offline.root.name}/multirun"
    assert (start.run_group, start.job_type, start.project) == (group, "ppo", "rlhf-memory")
    settings = values(start.config.update)
    assert settings["seed"] == 0 and settings["model"]["name"] == "tiny"


def test_wandb_is_quiet_and_stays_in_the_folder_of_the_run(offline):
    assert offline.printed == []
    assert list((offline.root / "home").rglob("*wandb*")) == []


KEY = "0" * 40


@pytest.fixture
def silent_server():
    """The port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port


@pytest.mark.parametrize("kind", ["silent_server", "closed_port"])
def test_an_unreachable_server_costs_one_line(tmp_path, request, kind):
    address = f"http://127.0.0.1:{request.getfixturevalue(kind)}"
    (line,) = run(tmp_path, "online", seconds=(3, 20), WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
    assert line.startswith("W&B is off for the rest of this run (") and line.endswith("metrics.jsonl has everything.")


def test_a_run_does_not_wait_for_a_server_longer_than_it_may(tmp_path, silent_server):
    address = f"http://127.0.0.1:{silent_server}"
    (line,) = run(tmp_path, "online", seconds=(6, 0.5), WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
    assert "(it did not finish within 0.5 s)" in line


def test_no_key_is_not_asked_for(tmp_path, closed_port):
    (line,) = run(tmp_path, "online", WANDB_BASE_URL=f"http://127.0.0.1:{closed_port}", HOME=str(tmp_path))
    assert "(ValueError: wandb.mode=online needs an API key" in line


def test_a_server_that_hangs_blocks_neither_logging_nor_closing(tmp_path, monkeypatch, capsys):
    hanging = threading.Event()
    monkeypatch.setattr(Tracker, "_start", lambda self: hanging.wait(60))
    monkeypatch.setattr(rlhf.tracking, "QUEUE_SIZE", 50)
    monkeypatch.setattr(rlhf.tracking, "CLOSE_SECONDS", 0.2)
    tracker = Tracker(tmp_path, "sft", config("wandb.mode=offline"))
    for step in range(1000):  # far over the queue: a blocking put would never return
        tracker.log(step, {"loss": 1.0})
    tracker.close(summary={}, failed=False)
    assert not hanging.is_set()
    assert capsys.readouterr().err == (
        "W&B is off for the rest of this run (it did not finish within 0.2 s); metrics.jsonl has everything.\n"
    )
    hanging.set()


def test_an_error_ends_the_tracking_once(tmp_path, monkeypatch, capsys):
    class Broken:
        def log(self, row):
            raise RuntimeError("disk full\nand more")

    monkeypatch.setattr(Tracker, "_start", lambda self: Broken())
    tracker = Tracker(tmp_path, "sft", config("wandb.mode=offline"))
    tracker.log(1, {"loss": 1.0})
    tracker._thread.join(10)
    tracker.log(2, {"loss": 1.0})
    tracker.close(summary={}, failed=False)
    assert capsys.readouterr().err == (
        "W&B is off for the rest of this run (RuntimeError: disk full); metrics.jsonl has everything.\n"
    )


@pytest.mark.parametrize(("mode", "enabled"), [("disabled", True), ("offline", False)])
def test_disabled_and_other_ranks_start_nothing(tmp_path, mode, enabled):
    before = threading.active_count()
    tracker = Tracker(tmp_path, "sft", config(f"wandb.mode={mode}"), enabled=enabled)
    tracker.log(1, {"loss": 1.0})
    tracker.close(summary={}, failed=False)
    assert threading.active_count() == before and not list(tmp_path.iterdir())
    with pytest.raises(queue.Empty):
        tracker._updates.get_nowait()


def test_runs_are_grouped_by_sweep_or_else_by_run(tmp_path):
    sweep = tmp_path / "multirun" / "12-00"
    sweep.mkdir(parents=True)
    (sweep / "multirun.yaml").touch()
    assert group_of(sweep / "3") == group_of(sweep / "4" / "sft") == "multirun/12-00"
    assert group_of(tmp_path / "outputs" / "a") == group_of(tmp_path / "outputs" / "a" / "ppo") == "outputs/a"
