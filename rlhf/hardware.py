"""What this machine has, found without torch, and the `hardware=` settings that are left to it."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlhf.config import HardwareConfig
from rlhf.joined import Joined, joined


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: float


@dataclass(frozen=True)
class Machine:
    """This machine as far as this process may use it. `joined`: the ranks that a launcher started, this among them."""

    gpus: tuple[Gpu, ...]
    host_memory_bytes: int
    joined: Joined | None = None


def detect(environ: Mapping[str, str] = os.environ) -> Machine:
    """Look at this machine. Raises ConfigError when a launcher left its ranks without what they need."""
    gpus = () if _torch_is_cpu_only() else visible_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(gpus, _host_memory_bytes(), joined(environ))


def fill(config: HardwareConfig, machine: Machine) -> HardwareConfig:
    """`config` with what it leaves open (null) taken from `machine`. What it states is never changed."""
    device = config.device or ("cuda" if machine.gpus else "cpu")
    gpus = machine.gpus if device == "cuda" else ()
    devices, nodes = config.devices, config.nodes
    if devices is None and machine.joined and nodes == 1:
        devices, nodes = machine.joined.local_world_size, machine.joined.nodes
    update = {
        "device": device,
        "devices": devices or max(len(gpus), 1),
        "nodes": nodes,
        "host_memory_gib": config.host_memory_gib or in_gib(machine.host_memory_bytes),
    }
    if gpus:  # of unequal ones, the weakest decides
        update["device_memory_gib"] = config.device_memory_gib or in_gib(min(gpu.memory_bytes for gpu in gpus))
        update["compute_capability"] = config.compute_capability or min(gpu.compute_capability for gpu in gpus)
    return config.model_copy(update=update)


def in_gib(size_bytes: int) -> float:
    return round(size_bytes / 2**30, 2)


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA would show, by NVML; none without a driver. `visible` is CUDA_VISIBLE_DEVICES."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        chosen = list(range(len(handles))) if visible is None else selected(visible, uuids)
        return tuple(_gpu(handles[item] if isinstance(item, int) else _mig_slice(item)) for item in chosen)
    except pynvml.NVMLError:  # e.g. a slice that is not there
        return ()
    finally:
        pynvml.nvmlShutdown()


def selected(visible: str, uuids: list[str]) -> list[int | str]:
    """How CUDA reads CUDA_VISIBLE_DEVICES where the driver lists the GPUs `uuids`: positions, and UUIDs of MIG slices.

    Entries are positions or beginnings of UUIDs; the first that is none, or comes a second time, ends the list.
    """
    chosen = list[int | str]()
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.startswith("MIG-"):
            found: list[int | str] = [entry]
        elif entry.startswith("GPU-"):
            found = [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]
        else:
            found = [int(entry)] if entry.isdecimal() and int(entry) < len(uuids) else []
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _mig_slice(uuid: str):
    import pynvml

    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _gpu(handle) -> Gpu:
    import pynvml

    try:  # a slice has memory of its own, the rest is its GPU's
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except pynvml.NVMLError:
        whole = handle
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(whole)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(whole)),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        compute_capability=major + minor / 10,
    )


def _text(value: str | bytes) -> str:  # older releases of nvidia-ml-py answer in bytes
    return value.decode() if isinstance(value, bytes) else value


def _torch_is_cpu_only() -> bool:
    """True where the installed torch cannot use a GPU, whatever the machine has."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def _host_memory_bytes() -> int:
    """Of this machine, or of the container (cgroup v2) when that may use less."""
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
