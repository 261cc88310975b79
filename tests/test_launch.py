"""Real processes: rlhf.ranks with the entrypoints of launch_workers.py, and the parent's side around it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf import failures, files, launch
from rlhf.config import HardwareConfig

HERE = Path(__file__).parent
WORKERS = HERE / "launch_workers.py"
PATIENCE_SECONDS = 120  # only ends a test that hangs


def hardware(**changes: object) -> HardwareConfig:
    given = {"name": "test", "device": "cpu", "devices": 2, "nodes": 1, "timeout_minutes": 5.0, **changes}
    return HardwareConfig.model_validate(dict.fromkeys(HardwareConfig.model_fields) | given)


def command(worker: str, folder: Path, devices: int, *rendezvous: str) -> list[str]:
    return [sys.executable, str(WORKERS), worker, str(folder), str(os.getpid()), str(devices), *rendezvous]


def supervise(worker: str, folder: Path, devices: int, timeout_minutes: float = 5.0) -> int:
    failures.clear(folder)
    env = launch.environment(hardware()) | {"OMP_NUM_THREADS": "1"}
    with launch.Interrupt() as interrupt:
        return launch.supervise(command(worker, folder, devices), folder, env, timeout_minutes, interrupt)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def pids(folder: Path, ranks: int) -> list[int]:
    found = [beat["pid"] for beat in failures.heartbeats(folder).values()]
    assert len(found) == ranks
    return found


def test_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise("succeed", tmp_path, 2) == 0
    seen = [files.read_json(tmp_path / f"seen_{rank}.json") for rank in range(2)]
    assert seen == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(2)
    ]
    # Rank 0 has the terminal, the others a file; so have the programs that they start.
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 speaks", "rank 0 speaks through a child"]
    log = (tmp_path / "ranks" / "rank_1.log").read_text()
    assert sorted(log.splitlines()) == ["rank 1 speaks", "rank 1 speaks through a child"]


def test_first_error_wins_and_ends_all(tmp_path: Path) -> None:
    assert supervise("second_rank_raises", tmp_path, 4) == 1  # 2 of the 4 would hang for ever
    errors = failures.errors(tmp_path)
    assert [(e["rank"], e["type"], e["message"]) for e in errors] == [
        (1, "RuntimeError", "the cause"),
        (0, "ConnectionError", "a consequence"),
    ]
    shown = launch._message(tmp_path, errors)
    assert shown.splitlines()[0] == "Rank 1 failed first at step 0 in phase start: RuntimeError: the cause"
    assert "a consequence" not in shown
    assert not any(map(alive, pids(tmp_path, 4)))


def test_a_killed_rank_comes_before_those_that_missed_it(tmp_path: Path) -> None:
    assert supervise("peer_notices_kill", tmp_path, 2) == 1
    assert [(e["rank"], e["type"]) for e in failures.errors(tmp_path)] == [(1, "SIGKILL"), (0, "ConnectionError")]


@pytest.mark.parametrize(
    ("worker", "devices", "rank", "code", "kind"),
    [
        ("leave_silently", 2, 1, 1, "exit code 0"),
        ("leave_alone", 1, 0, 1, "exit code 0"),
        ("leave_with_7", 2, 1, 7, "exit code 7"),
    ],
)
def test_a_rank_that_leaves_ends_the_others(
    tmp_path: Path, worker: str, devices: int, rank: int, code: int, kind: str
) -> None:
    assert supervise(worker, tmp_path, devices) == code
    assert [(e["rank"], e["type"]) for e in failures.errors(tmp_path)] == [(rank, kind)]
    assert not any(map(alive, pids(tmp_path, devices)))


def test_watchdog_ends_the_ranks(tmp_path: Path) -> None:
    assert supervise("hang", tmp_path, 1, timeout_minutes=0.1) == 1
    (error,) = failures.errors(tmp_path)
    assert (error["rank"], error["type"]) == (0, "TimeoutError")
    assert "No rank got on for 0.1 minutes (hardware.timeout_minutes)" in launch._message(tmp_path, [error])
    assert not any(alive(beat["pid"]) for beat in failures.heartbeats(tmp_path).values())


def test_watchdog_names_the_phases(tmp_path: Path) -> None:
    failures.clear(tmp_path)
    watchdog = launch.Watchdog(tmp_path, timeout_minutes=0.01)
    failures.write_heartbeat(tmp_path, 1, "generate")
    wait_for(watchdog.expired, "the first look at rank 1 to be too long ago")
    assert watchdog.slowest() == 1
    failures.write_heartbeat(tmp_path, 0, "update")
    wait_for(lambda: "rank 0" in watchdog.report() or watchdog.expired(), "rank 0 to be seen")
    assert not watchdog.expired()  # rank 0 has got on
    wait_for(watchdog.expired, "rank 0 to be too long in its phase")
    lines = watchdog.report().splitlines()
    assert lines[1].startswith("  rank 0: step 0, phase update for ")
    assert lines[2].startswith("  rank 1: step 0, phase generate for ")


PARENT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_launch as t
from rlhf import launch
folder = Path(sys.argv[2])
with launch.Interrupt() as interrupt:
    t.failures.clear(folder)
    command = t.command(sys.argv[1], folder, 2)
    code = launch.supervise(command, folder, launch.environment(t.hardware()), 5.0, interrupt)
print("code", code, "asks for", interrupt.code)
"""


def start_parent(worker: str, folder: Path) -> subprocess.Popen[str]:
    env = launch.environment(hardware()) | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", PARENT.format(here=str(HERE)), worker, str(folder)]
    return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_lets_the_ranks_save(tmp_path: Path, signum: signal.Signals, code: int) -> None:
    parent = start_parent("save_on_sigterm", tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("ready_*"))) == 2, "the ranks")
    parent.send_signal(signum)
    out, err = parent.communicate(timeout=PATIENCE_SECONDS)
    assert out.splitlines() == [f"code 0 asks for {code}"]
    assert "Stopping after this step; press Ctrl-C again to stop at once." in err
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]


def test_second_signal_kills(tmp_path: Path) -> None:
    parent = start_parent("hang", tmp_path)
    wait_for(lambda: len(failures.heartbeats(tmp_path)) == 2, "the ranks")
    ranks = pids(tmp_path, 2)
    assert all(map(alive, ranks))
    parent.send_signal(signal.SIGINT)
    assert parent.stderr is not None
    parent.stderr.readline()
    assert "Stopping after this step" in parent.stderr.readline()
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=PATIENCE_SECONDS)
    assert out.splitlines() == ["code -9 asks for 130"]
    wait_for(lambda: not any(map(alive, ranks)), "the ranks' end")


def test_no_orphans_after_kill_of_the_parent(tmp_path: Path) -> None:
    parent = start_parent("hang", tmp_path)
    wait_for(lambda: len(failures.heartbeats(tmp_path)) == 2, "the ranks")
    ranks = pids(tmp_path, 2)
    assert all(map(alive, ranks))
    parent.kill()
    parent.communicate(timeout=PATIENCE_SECONDS)
    wait_for(lambda: not any(map(alive, ranks)), "the ranks' end")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_nodes(worker: str, folder: Path) -> list[int]:
    failures.clear(folder)
    env = launch.environment(hardware()) | {"OMP_NUM_THREADS": "1"}
    rendezvous = f"127.0.0.1:{free_port()}"
    nodes = [subprocess.Popen(command(worker, folder, 1, "2", rendezvous), env=env) for _ in range(2)]
    return [node.wait(timeout=PATIENCE_SECONDS) for node in nodes]


def test_two_nodes(tmp_path: Path) -> None:
    assert two_nodes("talk", tmp_path) == [0, 0]
    assert files.read_json(tmp_path / "result.json") == {"status": "ok", "sum": 3.0}


def test_an_error_on_one_node_ends_the_other(tmp_path: Path) -> None:
    codes = two_nodes("leave_with_7", tmp_path)
    assert 0 not in codes and 7 in codes
    assert [(e["rank"], e["type"]) for e in failures.errors(tmp_path)] == [(1, "exit code 7")]
    assert not any(map(alive, pids(tmp_path, 2)))


def train(folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """train.py itself: SFT of the tiny model on two ranks and eight rows."""
    folder.mkdir()
    rows = [{"prompt": f"Say {word}.", "answer": word} for word in "abcdefgh"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = f"""stage=sft model=tiny precision=fp32 hardware=cpu hardware.devices=2 wandb.mode=disabled
        data.sft={folder / "rows.jsonl"} data.sft_heldout=null data.heldout_fraction=0.25 data.cache=null
        stage.total_batch=4 stage.micro_batch=2 stage.warmup_steps=0 stage.epochs=2
        hydra.run.dir={folder}""".split()
    program = [sys.executable, *launcher, str(HERE.parent / "train.py"), *given, *overrides]
    env = launch.environment(hardware()) | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(program, env=env, cwd=folder, capture_output=True, text=True, check=False)


def test_joined_ranks_train_as_our_own(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ours, theirs = train(tmp_path / "ours"), train(tmp_path / "theirs", launcher=torchrun)
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    metrics = (tmp_path / "ours" / "metrics.jsonl").read_text()
    assert len(metrics.splitlines()) >= 3
    assert (tmp_path / "theirs" / "metrics.jsonl").read_text() == metrics


def test_a_ranks_config_error_leaves_as_the_parents_own(tmp_path: Path) -> None:
    refused = train(tmp_path / "run", "data.max_prompt_length=1")
    assert refused.returncode == 2
    assert "The configuration is refused:" in refused.stderr and "gives no rows" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_SIZE", "8")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0a")
    cores = len(os.sched_getaffinity(0))
    env = launch.environment(hardware(devices=1, device="cuda"))
    assert env["OMP_NUM_THREADS"] == str(cores)
    assert env["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0"
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert not env.keys() & {"LOCAL_SIZE", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE"}
    env = launch.environment(hardware(devices=4 * cores))
    assert (env["OMP_NUM_THREADS"], env["DS_ACCELERATOR"], env["CUDA_VISIBLE_DEVICES"]) == ("1", "cpu", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch.environment(hardware())["OMP_NUM_THREADS"] == "3"


def test_no_torch_in_the_parent() -> None:
    probe = "import rlhf.launch, rlhf.ranks, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", probe], env=launch.environment(hardware()), check=True)
