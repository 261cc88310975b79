"""Reading the memory of a device: torch's allocator and NVML on CUDA, resident memory on CPU."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml
import torch

from rlhf.memory import Usage

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """`peak` is since the last reset; where only samples can tell a peak, it is the present value."""

    now: Usage
    peak: Usage


class HostMeter:
    """Resident memory of this process beyond that at construction.

    Linux keeps the peak and lets a process reset it (proc(5): clear_refs 5, VmHWM), so no peak is missed between
    samples. Elsewhere the samples have to do.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._kernel_keeps_peak = self._try_reset()
        self._start_bytes = self._process.memory_info().rss

    def read(self) -> Reading:
        now = peak = self._process.memory_info().rss
        if self._kernel_keeps_peak:
            status = Path("/proc/self/status").read_bytes()
            peak = max(now, int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024)
        return Reading(self._usage(now), self._usage(peak))

    def _usage(self, resident_bytes: int) -> Usage:
        beyond = max(0, resident_bytes - self._start_bytes)
        return Usage(beyond, beyond, beyond)

    def reset_peak(self) -> None:
        if self._kernel_keeps_peak:
            self._try_reset()

    def _try_reset(self) -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> float:
        return 0.0  # torch caches nothing on CPU


class MigInstance(NamedTuple):
    uuid: str
    gpu_instance: int
    compute_instance: int


def nvml_name(cuda_uuid: str, visible: str, cards: Mapping[str, Sequence[MigInstance]]) -> str:
    """NVML's UUID of the device that CUDA calls `cuda_uuid`.

    CUDA's order of devices is not NVML's, and CUDA_VISIBLE_DEVICES renumbers them: only UUIDs agree (A54). A slice
    of a card in MIG mode goes by the slice's UUID or by the card's, depending on the driver; then `visible`, the
    value of CUDA_VISIBLE_DEVICES, tells which slice. CUDA shows a process one slice at most.

    `cards` maps each card's UUID to its slices, none outside MIG mode. Raises LookupError for an unknown device.
    """
    slices = {one.uuid for instances in cards.values() for one in instances}
    if f"MIG-{cuda_uuid}" in slices:
        return f"MIG-{cuda_uuid}"
    card = f"GPU-{cuda_uuid}"
    if not cards[card]:
        return card
    named = visible.split(",")[0].strip()
    for one in cards[card]:
        if named == f"MIG-{card}/{one.gpu_instance}/{one.compute_instance}":  # the name before driver 470
            return one.uuid
        if named.startswith("MIG-") and one.uuid.startswith(named):
            return one.uuid
    return cards[card][0].uuid


class Cards(NamedTuple):
    """Every card and slice that NVML shows, with what was in use when it was looked at."""

    handles: dict[str, Any]
    slices: dict[str, list[MigInstance]]
    in_use_bytes: dict[str, int]


@cache
def cards_at_start() -> Cards:
    """Looks at all cards, once per process: later calls return the same.

    All, because only CUDA can tell which one is ours, and asking starts it. Raises pynvml.NVMLError without a driver.
    """
    if torch.cuda.is_initialized():
        logger.warning("CUDA was started before memory was looked at: its context does not count as used.")
    pynvml.nvmlInit()
    cards = Cards({}, {}, {})
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        card = pynvml.nvmlDeviceGetUUID(handle)
        cards.handles[card] = handle
        cards.slices[card] = []
        for instance, part in slices_of(handle):
            cards.handles[instance.uuid] = part
            cards.slices[card].append(instance)
    cards.in_use_bytes.update({uuid: in_use_bytes(handle) for uuid, handle in cards.handles.items()})
    return cards


def slices_of(card: Any) -> Iterator[tuple[MigInstance, Any]]:
    try:
        slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except pynvml.NVMLError:  # a card without MIG
        return
    for slot in range(slots):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, slot)
        except pynvml.NVMLError:  # an empty slot
            continue
        gpu_instance = pynvml.nvmlDeviceGetGpuInstanceId(part)
        compute_instance = pynvml.nvmlDeviceGetComputeInstanceId(part)
        yield MigInstance(pynvml.nvmlDeviceGetUUID(part), gpu_instance, compute_instance), part


def in_use_bytes(handle: Any) -> int:
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def note_start() -> None:
    """Call it before CUDA starts in this process, so that the CUDA context counts as used (A54)."""
    try:
        cards_at_start()
    except pynvml.NVMLError:
        pass  # no driver: nothing to note on CPU, and on CUDA the meter says so


class Nvml:
    """Bytes in use on one card, or slice of one, beyond those at the start.

    Raises pynvml.NVMLError without a driver, LookupError where NVML does not know the device.
    """

    def __init__(self, device: torch.device):
        cards = cards_at_start()
        cuda_uuid = str(torch.cuda.get_device_properties(device).uuid)
        self.name = nvml_name(cuda_uuid, os.environ.get("CUDA_VISIBLE_DEVICES", ""), cards.slices)
        self._handle = cards.handles[self.name]
        self._start_bytes = cards.in_use_bytes[self.name]

    def used_bytes(self) -> int:
        return max(0, in_use_bytes(self._handle) - self._start_bytes)


class CudaMeter:
    """torch's allocator keeps its own peaks; the device's is known at samples only."""

    def __init__(self, device: torch.device):
        self._device = device
        self._nvml: Nvml | None = None
        try:
            self._nvml = Nvml(device)
        except (pynvml.NVMLError, LookupError) as error:
            self._do_without_nvml(error)

    def _do_without_nvml(self, error: Exception) -> None:
        logger.warning(
            "NVML gives no reading (%s): device memory is read from CUDA, including other processes'.", error
        )
        self._nvml = None

    def read(self) -> Reading:
        stats = torch.cuda.memory.memory_stats_as_nested_dict(self._device)
        # Empty until the first allocation.
        allocated, reserved = (
            stats[name]["all"] if stats else {"current": 0, "peak": 0} for name in ("allocated_bytes", "reserved_bytes")
        )
        used = self._used_bytes()
        return Reading(
            Usage(allocated["current"], reserved["current"], used), Usage(allocated["peak"], reserved["peak"], used)
        )

    def _used_bytes(self) -> int:
        if self._nvml is not None:
            try:
                return self._nvml.used_bytes()
            except pynvml.NVMLError as error:
                self._do_without_nvml(error)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def empty_cache(self) -> float:
        """Returns the seconds that it took, work still queued on the device not counted."""
        self.synchronize()
        start = time.perf_counter()
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
        return time.perf_counter() - start


Meter = HostMeter | CudaMeter


def meter_for(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else HostMeter()
