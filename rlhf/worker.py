"""One rank: opens the record and the monitor, loads the framework, trains, and writes what came of it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from rlhf.config import Config, ConfigError, from_yaml
from rlhf.memory import prepare_allocator

prepare_allocator()
# DeepSpeed calls collectives by names that newer torch deprecates, at every step.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from rlhf import data, distributed, failures, frameworks  # noqa: E402
from rlhf.memory import meters  # noqa: E402
from rlhf.memory.monitor import Monitor  # noqa: E402
from rlhf.metrics import Recorder  # noqa: E402
from rlhf.models.build import load_tokenizer, local_source  # noqa: E402
from rlhf.outcome import FAILED, OK, OUT_OF_MEMORY, REFUSED, interrupted_by  # noqa: E402
from rlhf.progress import Progress  # noqa: E402
from rlhf.stages.loop import Interrupted  # noqa: E402

JOIN_MINUTES = 30.0  # how long ranks of a launcher wait for one another at the start


class StopRequest:
    """Set by SIGINT or SIGTERM; the loop sees it at the end of its step, saves and leaves."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._set)

    def _set(self, number: int, frame) -> None:
        self.signal = number

    def __call__(self) -> bool:
        return self.signal is not None


@dataclasses.dataclass
class Run:
    """What a stage gets beside its config: where it runs, where it writes, whether it should stop."""

    config: Config
    stage: Any  # SftConfig, RmConfig or PpoConfig: each stage function knows which
    folder: Path
    device: torch.device
    rank: int
    world_size: int
    recorder: Recorder
    monitor: Monitor
    stop_requested: StopRequest
    resuming: bool
    tokenizer: Any = None
    source: str | None = None  # where the weights are: a folder or a hub name; None for random weights
    dropped: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # by kind of data, rows by reason
    steps_done: int = 0
    tokens: float = 0.0  # of the total batch of the step just done, over all ranks
    _progress: Progress | None = None

    @property
    def source_name(self) -> str:
        return self.config.model.path or self.source or self.config.model.name

    def load_data(self, kind) -> data.Split:
        split = data.load(
            kind,
            self.config.data,
            self.tokenizer,
            self.config.seed,
            is_builder=self.rank == 0,
            barrier=distributed.barrier,
        )
        if not split.heldout:
            raise ConfigError(
                [
                    f"data={self.config.data.name} leaves no held-out rows for {kind}; "
                    f"set data.{kind}_heldout or data.heldout_fraction"
                ]
            )
        if split.dropped:
            counts = ", ".join(f"{count} {reason}" for reason, count in split.dropped.items())
            self.note(f"{kind}: {len(split.train)} rows, {len(split.heldout)} held out; dropped {counts}")
            self.dropped[kind] = split.dropped
        return split

    def progress(self, steps: int) -> Progress:
        self._progress = Progress(self.stage.name, steps, self.rank)
        return self._progress

    def note(self, text: str) -> None:
        """One line for the user, from rank 0."""
        if self.rank == 0:
            self._progress.note(text) if self._progress else print(text, flush=True)


def pick_device(config: Config) -> torch.device:
    """Also notes what the card holds before this process touches it, so that the CUDA context counts as ours (A54)."""
    meters.note_start()
    if config.hardware.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(folder: Path | None) -> Path:
    """Under a launcher of the user's: rank 0 tells the others the run's folder, which they cannot know (A50)."""
    open_process_group(torch.device("cuda" if torch.cuda.is_available() else "cpu", 0), JOIN_MINUTES)
    return distributed.from_rank_zero(folder)


def open_process_group(device: torch.device, timeout_minutes: float) -> None:
    """Once per process; a rank alone gets a group too, since frameworks ask for one."""
    if dist.is_initialized():
        return
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(minutes=timeout_minutes)
    dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None)


def prepare_torch(config: Config) -> None:
    torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
    torch.backends.cudnn.allow_tf32 = config.precision.tf32
    torch.manual_seed(config.seed + int(os.environ.get("RANK", "0")))


def main(folder: str) -> None:
    """Runs the stage whose config.yaml stands in `folder`. Leaves through SystemExit with the run's exit code."""
    path = Path(folder)
    config = from_yaml(path / "config.yaml")
    device = pick_device(config)
    prepare_torch(config)
    open_process_group(device, config.hardware.timeout_minutes)
    run = open_run(config, path, device)
    status, error, metrics, code = "ok", None, {}, OK
    try:
        run.source = (
            None
            if config.model.random_init and config.model.path is None
            else local_source(config.model, Path(config.data.cache or path), run.rank == 0, distributed.barrier)
        )
        run.tokenizer = load_tokenizer(config.model, run.source)
        metrics = frameworks.load(config, device).train(config, run)
    except Interrupted:
        status, code = "interrupted", interrupted_by(run.stop_requested.signal or signal.SIGTERM)
    except torch.OutOfMemoryError as caught:
        status, code, error = "oom", OUT_OF_MEMORY, describe(run, caught)
    except ConfigError as caught:
        status, code, error = "failed", REFUSED, describe(run, caught)
    except Exception as caught:
        status, code, error = "failed", FAILED, describe(run, caught)
    finish(run, status, error, metrics)
    if code != OK:
        sys.exit(code)


def open_run(config: Config, folder: Path, device: torch.device) -> Run:
    rank, world_size = distributed.rank(), distributed.world_size()
    (stage,) = config.stages
    return Run(
        config=config,
        stage=stage,
        folder=folder,
        device=device,
        rank=rank,
        world_size=world_size,
        recorder=Recorder(folder, stage.name, config, rank, config.framework.name),
        monitor=Monitor(folder, config.monitor, device, rank, world_size),
        stop_requested=StopRequest(),
        resuming=bool(config.resume),
    )


def describe(run: Run, caught: BaseException) -> dict[str, Any]:
    """The error with where it happened. Every rank's goes to ranks/error_<k>.json with its traceback."""
    failures.write_error(run.folder, run.rank, caught)
    phase, role = run.monitor.open_phase()
    error = {"rank": run.rank, "phase": phase, "role": role, "type": type(caught).__name__, "message": str(caught)}
    if isinstance(caught, ConfigError):
        error["problems"] = caught.problems
    return error


def finish(run: Run, status: str, error: dict[str, Any] | None, metrics: dict[str, float]) -> None:
    """Writes result.json from rank 0. A rank that failed cannot ask the others for their peaks, so it gives its own."""
    run.monitor.close()
    peaks = distributed.gather_objects(run.monitor.peaks()) if error is None else [run.monitor.peaks()]
    measured = summarise(peaks)
    if run.rank != 0 and error is None:
        return
    run.recorder.finish(
        {
            "status": status,
            "zero_stage": run.config.zero.zero_stage,
            "ranks": run.world_size,
            "steps": run.steps_done,
            "metrics": metrics,
            "memory": {"predicted": None, "measured": measured},
            "error": error,
        }
    )


def summarise(peaks: list[dict[str, Any]]) -> dict[str, Any]:
    """Peaks of all ranks as result.json holds them: per phase and role the largest over ranks, and the largest of
    all."""
    phases: dict[str, dict[str, dict[str, Any]]] = {}
    for rank_peaks in peaks:
        for phase, roles in rank_peaks.items():
            for role, values in roles.items():
                kept = phases.setdefault(phase, {}).setdefault(role, dict(values))
                kept.update({name: max(kept[name], value) for name, value in values.items()})
    cells = [(values["device_bytes"], phase, role) for phase, roles in phases.items() for role, values in roles.items()]
    peak_bytes, peak_phase, peak_role = max(cells, default=(0, None, None))
    return {"peak_bytes": peak_bytes, "peak_phase": peak_phase, "peak_role": peak_role, "phases": phases}
