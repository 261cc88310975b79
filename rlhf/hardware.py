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
    """The GPUs that CUDA would show, by NVML; none without a driver. `visible` is CUDA_VISIBLE_DEVICES.

    CUDA's own reading of it: indices or UUID prefixes, in this order, up to the first that does not exist.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        chosen = handles if visible is None else _chosen(handles, visible)
        return tuple(_gpu(handle) for handle in chosen)
    finally:
        pynvml.nvmlShutdown()


def _chosen(handles: list, visible: str) -> list:
    import pynvml

    chosen = []
    for entry in (entry.strip() for entry in visible.split(",")):
        if entry.startswith("MIG-"):
            try:
                found = [pynvml.nvmlDeviceGetHandleByUUID(entry)]
            except pynvml.NVMLError:
                found = []
        elif entry.startswith("GPU-"):
            found = [handle for handle in handles if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(entry)]
        else:
            found = handles[int(entry) : int(entry) + 1] if entry.isdecimal() else []
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _gpu(handle) -> Gpu:
    import pynvml

    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
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
