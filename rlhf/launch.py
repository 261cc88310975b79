"""Runs a config's stages: starts the ranks of each, waits for them, tells what went wrong. No torch here.

train.py -> launch.run -> rlhf.ranks (a process per stage and machine) -> rlhf.worker (a process per rank).
Under torchrun, deepspeed, srun or mpirun this process is a rank itself and starts none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rlhf import chain, failures, files, resuming
from rlhf.config import AnyStage, Config, ConfigError, HardwareConfig, to_yaml
from rlhf.joined import Joined, joined
from rlhf.outcome import FAILED, INTERRUPTED, OK, OUT_OF_MEMORY, interrupted_by

POLL_SECONDS = 0.2


def run(config: Config, folder: Path) -> int:
    """Run every stage of `config` that has not been completed in `folder`, in order; returns the exit code.

    Raises ConfigError when a rank finds that the config cannot run, with the rank's sentences.
    """
    place = joined()
    if place is None or place.rank == 0:
        open_folder(config, folder)
    try:
        if place is not None:
            return _run_joined(config, folder, place)
        with Interrupt() as interrupt:
            return _run_stages(config, folder, interrupt)
    finally:
        if len(config.stages) > 1 and (place is None or place.rank == 0):
            chain.summarise(config, folder)


def _run_stages(config: Config, folder: Path, interrupt: Interrupt) -> int:
    code = OK
    for stage in config.stages:
        if chain.finished(config, stage, folder):
            print(f"Stage {stage.name} is complete in {chain.stage_folder(config, stage, folder)}.")
            continue
        code = interrupt.code or _run_stage(config, stage, folder, interrupt)
        if code != OK:
            break
    return code


def open_folder(config: Config, folder: Path) -> None:
    """Refuse a folder that holds another run; keep what this one was asked to do. Raises ConfigError."""
    resuming.check(config, folder)
    if not (folder / "config.yaml").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / "config.yaml", to_yaml(config))


def _run_stage(config: Config, stage: AnyStage, folder: Path, interrupt: Interrupt) -> int:
    home = chain.stage_folder(config, stage, folder)
    alone = chain.stage_config(config, stage, folder)
    chain.prepare(alone, home)
    command = [sys.executable, "-m", "rlhf.ranks", str(home), str(os.getpid())]
    begin = time.monotonic()
    code = supervise(command, home, environment(alone.hardware), alone.hardware.timeout_minutes, interrupt)
    return conclude(alone, home, code, time.monotonic() - begin, interrupt.code)


def environment(hardware: HardwareConfig) -> dict[str, str]:
    """The environment of the ranks on this machine."""
    env = dict(os.environ)
    env.pop("LOCAL_SIZE", None)  # deepspeed's launcher sets it, and DeepSpeed then waits for that many ranks
    env["TOKENIZERS_PARALLELISM"] = "false"
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // (hardware.devices or 1))))
    if hardware.device == "cpu":
        env["DS_ACCELERATOR"] = "cpu"
        # Threads that spin while they wait make a step ten times as long as soon as anything else wants a core.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        env["CUDA_VISIBLE_DEVICES"] = ""
    if "TORCH_CUDA_ARCH_LIST" in env:  # DeepSpeed cannot build its kernels for "9.0a", which some images set
        env["TORCH_CUDA_ARCH_LIST"] = env["TORCH_CUDA_ARCH_LIST"].replace("9.0a", "9.0")
    # train.py may have been started from another folder.
    paths = [str(Path(__file__).parent.parent), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return env


class Interrupt:
    """Ctrl-C and SIGTERM while stages run: the first asks the ranks to save and stop, the second kills them."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def code(self) -> int:
        """The exit code to leave with: 130, 143, or 0 when nobody has asked to stop."""
        return 0 if self.signal is None else interrupted_by(self.signal)

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def attach(self, process: subprocess.Popen[bytes] | None) -> None:
        """Signals concern this process from now on."""
        self._process = process
        if process is not None and self.signal is not None:
            process.terminate()

    def _handle(self, signum: int, _frame: FrameType | None) -> None:
        first = self.signal is None
        if first:
            self.signal = signum
            # os.write: print would fail when the signal arrives inside another print.
            os.write(2, b"\nStopping after this step; press Ctrl-C again to stop at once.\n")
        if self._process is not None:
            self._process.terminate() if first else kill_group(self._process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads its own session, and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of them have ended


def supervise(
    command: list[str], folder: Path, env: dict[str, str], timeout_minutes: float, interrupt: Interrupt
) -> int:
    """Run `command`, which starts the ranks, to its end; returns its exit code (negative for a signal).

    In a session of its own, so that the terminal's Ctrl-C reaches this process alone.
    """
    process = subprocess.Popen(command, env=env, start_new_session=True)
    interrupt.attach(process)
    try:
        return _wait(process, Watchdog(folder, timeout_minutes))
    finally:
        interrupt.attach(None)
        if process.returncode != OK:
            kill_group(process)
            process.wait()


def _wait(process: subprocess.Popen[bytes], watchdog: Watchdog) -> int:
    while True:
        try:
            return process.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            if watchdog.expired():
                failures.write_error(watchdog.folder, watchdog.slowest(), TimeoutError(watchdog.report()))
                return FAILED


class Watchdog:
    """Notices that no rank gets on (A16). A rank gets on when its step, phase or role changes."""

    def __init__(self, folder: Path, timeout_minutes: float):
        self.folder = folder
        self._timeout = timeout_minutes * 60
        self._last: dict[int, tuple[object, ...]] = {}
        self._since: dict[int, float] = {}
        self._changed = self._looked = time.monotonic()

    def expired(self) -> bool:
        now = time.monotonic()
        if now - self._looked < min(5.0, self._timeout / 4):
            return False
        self._looked = now
        for rank, beat in failures.heartbeats(self.folder).items():
            state = (beat["step"], beat["phase"], beat["role"])
            if self._last.get(rank) != state:
                self._last[rank], self._since[rank], self._changed = state, now, now
        return now - self._changed > self._timeout

    def slowest(self) -> int:
        """The rank that has been in its phase longest; 0 when none has started."""
        return min(self._since, key=lambda rank: self._since[rank], default=0)

    def report(self) -> str:
        now = time.monotonic()
        lines = [f"No rank got on for {self._timeout / 60:g} minutes (hardware.timeout_minutes), so the job was ended:"]
        for rank, (step, phase, role) in sorted(self._last.items()):
            whose = f" of the {role}" if role else ""
            lines.append(
                f"  rank {rank}: step {step}, phase {phase}{whose} for {(now - self._since[rank]) / 60:.1f} min"
            )
        if not self._last:
            lines.append("  no rank has started; on several machines, check hardware.rendezvous and hardware.nodes")
        return "\n".join(lines)


def conclude(config: Config, folder: Path, code: int, seconds: float, stopped: int) -> int:
    """Turn how a stage's ranks ended into train.py's exit code, a message, and a result.json in any case.

    `code` is that of rlhf.ranks, `stopped` the exit code that a signal asks for, or 0. Raises a rank's ConfigError.
    """
    written = chain.result(folder)
    status = written["status"] if written else None
    if code == OK and status == "ok":
        return OK
    if stopped or (code == OK and status == "interrupted"):
        chain.close(config, folder, "interrupted", seconds)
        return stopped or interrupted_by(signal.SIGTERM)
    errors = failures.errors(folder)
    problems = errors[0].get("problems") if errors else None
    out_of_memory = code == OUT_OF_MEMORY or status == "oom"
    chain.close(config, folder, "oom" if out_of_memory else "failed", seconds)
    if problems:
        raise ConfigError(problems)
    print(_message(folder, errors), file=sys.stderr)
    return OUT_OF_MEMORY if out_of_memory else FAILED


def _message(folder: Path, errors: list[dict[str, Any]]) -> str:
    if not errors:
        return f"The ranks ended without a result and without an error. Look into {folder / 'ranks'}."
    also = f", also those of the {len(errors) - 1} that failed after it" if len(errors) > 1 else ""
    return f"{failures.describe(errors[0])}\nFull tracebacks are in {folder / 'ranks'}{also}."


def _run_joined(config: Config, folder: Path, place: Joined) -> int:
    """The stages in this process, one of the launcher's ranks; rank 0 prepares the folders and says where they are."""
    os.environ.update(environment(config.hardware) | place.environment())
    os.environ.pop("LOCAL_SIZE", None)  # update() takes nothing away
    from rlhf import worker  # torch, and only after the environment

    first = place.rank == 0
    for stage in config.stages:
        home = chain.stage_folder(config, stage, folder)
        if first and not chain.finished(config, stage, folder):
            chain.prepare(chain.stage_config(config, stage, folder), home)
        home = worker.join(home if first else None)
        if chain.result(home) is not None:
            continue  # complete: rank 0 has removed any other result
        begin = time.monotonic()
        try:
            worker.main(str(home))
        except SystemExit as leaving:  # not on success
            assert isinstance(leaving.code, int)
            stopped = leaving.code if leaving.code in INTERRUPTED else 0
            return conclude(config.for_stage(stage), home, leaving.code, time.monotonic() - begin, stopped)
    return OK
