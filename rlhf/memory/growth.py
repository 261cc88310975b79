"""Memory that grows from step to step (A07): noticed at a fixed point of each step, and named."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from rlhf.memory import Usage

MIB = 2**20
WINDOW = 6  # steps whose growth is looked at together
QUIET_STEPS = 50  # after a warning

Category = tuple[tuple[int, ...], torch.dtype]


class Point(NamedTuple):
    step: int
    usage: Usage
    context: Mapping[str, float]


class GrowthWatch:
    """Warns when growth above the threshold lasts for two windows.

    Tensors are counted after the first window and again after the second: the difference is what grew. Nothing is
    counted as long as nothing grows, since a count walks over every Python object.
    """

    def __init__(self, threshold_bytes: float, device: torch.device):
        self._threshold_bytes = threshold_bytes
        self._device = device
        self._points: deque[Point] = deque(maxlen=WINDOW + 1)
        self._census: Counter[Category] | None = None
        self._quiet_until: int | None = None

    def observe(self, step: int, usage: Usage, context: Mapping[str, float]) -> list[str]:
        """Returns finished sentences, one per part of memory that grows; mostly none."""
        if self._quiet_until is not None and step < self._quiet_until:
            return []
        self._points.append(Point(step, usage, context))
        if len(self._points) <= WINDOW:
            return []
        growing = {part: rate for part, rate in self._rates().items() if rate > self._threshold_bytes}
        if not growing:
            self._census = None
            return []
        points, before = list(self._points), self._census
        self._points.clear()
        if before is None:
            self._points.append(points[-1])
            self._census = census(live_tensors(self._device))
            return []
        self._census = None
        self._quiet_until = step + QUIET_STEPS
        return [self._warning(part, rate, points, before) for part, rate in growing.items()]

    def _rates(self) -> dict[str, float]:
        """Bytes per step of the three disjoint parts of what the device has in use."""
        usages = [point.usage for point in self._points]
        return {
            "allocated": steady_growth([usage.allocated_bytes for usage in usages]),
            "cached": steady_growth([usage.fragmentation_bytes for usage in usages]),
            "outside": steady_growth([usage.outside_torch_bytes for usage in usages]),
        }

    def _warning(self, part: str, rate: float, points: list[Point], before: Counter[Category]) -> str:
        first, last = points[0], points[-1]
        by = f"{rate / MIB:.1f} MiB per step from step {first.step} to {last.step}"
        if part == "cached":
            what = (
                f"Memory that torch's allocator reserves but no tensor uses grew by {by}: fragmentation, no leak. Set "
                "monitor.empty_cache=true and PYTORCH_ALLOC_CONF=expandable_segments:True."
            )
        elif part == "outside":
            what = (
                f"Device memory outside torch's allocator grew by {by}: communication buffers, CUDA graphs, or another "
                "process on the device."
            )
        else:
            name = "Allocated" if self._device.type == "cuda" else "Resident"
            grown = last.usage.allocated_bytes - first.usage.allocated_bytes
            what = f"{name} memory grew by {by}. {what_grew(self._device, before, grown)}"
        return " ".join([what, *context_changes(first.context, last.context)])


def steady_growth(values: list[int]) -> float:
    """Mean growth from one value to the next, 0 unless the later half lies above the earlier one throughout.

    The largest step is left out. So neither noise nor a single jump passes for growth.
    """
    half = (len(values) + 1) // 2
    if min(values[half:]) <= max(values[:half]):
        return 0.0
    steps = [after - before for before, after in pairwise(values)]
    return (sum(steps) - max(steps)) / (len(steps) - 1)


def context_changes(first: Mapping[str, float], last: Mapping[str, float]) -> list[str]:
    return [
        f"Meanwhile {name} went from {first[name]:g} to {last[name]:g}."
        if first[name] != last[name]
        else f"Meanwhile {name} stayed at {last[name]:g}."
        for name in first.keys() & last.keys()
    ]


def what_grew(device: torch.device, before: Counter[Category], grown_bytes: int) -> str:
    """Names the tensors that became more since `before`, and how much of `grown_bytes` they do not explain."""
    tensors = live_tensors(device)
    grown = census(tensors) - before
    unseen = grown_bytes - sum(grown.values())
    sentences = []
    if grown:
        category, size_bytes = grown.most_common(1)[0]
        same = [tensor for tensor in tensors if category_of(tensor) == category]
        shape, dtype = category
        sentences.append(
            f"Most of it: {size_bytes / MIB:.1f} MiB more in tensors of shape {list(shape)} and type "
            f"{str(dtype).removeprefix('torch.')}, {len(same)} now{holder(same, tensors)}. Drop or detach what a step "
            "no longer needs."
        )
    if unseen > grown_bytes / 2:
        # a captured CUDA graph's pool and cuBLAS's workspace per stream come out of torch's allocator too
        others = "a captured CUDA graph, a library's workspace" if device.type == "cuda" else "no tensor at all"
        graph = "in tensors that only an autograd graph holds (a loss or a value kept without detach())"
        hidden = f"{graph}, or in {others}"
        sentences.append(f"{unseen / MIB:.1f} MiB of it are {hidden}.")
    return " ".join(sentences)


def live_tensors(device: torch.device) -> list[torch.Tensor]:
    """The largest tensor of each storage on `device` that Python's garbage collector knows."""
    largest: dict[int, torch.Tensor] = {}
    for item in gc.get_objects():
        # type() rather than isinstance: the latter asks proxies for their target.
        if not issubclass(type(item), torch.Tensor):
            continue
        if item.device.type != device.type or device.index not in (None, item.device.index):
            continue
        try:
            address = item.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper without storage of its own
            continue
        if address not in largest or item.numel() > largest[address].numel():
            largest[address] = item
    return list(largest.values())


def category_of(tensor: torch.Tensor) -> Category:
    return tuple(tensor.shape), tensor.dtype


def census(tensors: list[torch.Tensor]) -> Counter[Category]:
    """Bytes by shape and type."""
    sizes: Counter[Category] = Counter()
    for tensor in tensors:
        sizes[category_of(tensor)] += tensor.untyped_storage().nbytes()
    return sizes


def holder(same: list[torch.Tensor], own: list[torch.Tensor]) -> str:
    """`, held as 'name'`, where a name can be found for the container that holds most of `same`."""
    containers = [item for item in gc.get_referrers(*same) if item is not same and item is not own]
    members = {id(tensor) for tensor in same}
    if not containers:
        return ""
    most = max(containers, key=lambda item: sum(id(value) in members for value in values_of(item)))
    names = names_in(most, members) or [
        name for outer in gc.get_referrers(most) if outer is not containers for name in names_in(outer, {id(most)})
    ]
    return f", held as {names[0]!r}" if names else ""


def values_of(item: Any) -> Collection[Any]:
    if isinstance(item, (list, tuple, set, deque)):
        return item
    return mapping_of(item).values()


def names_in(item: Any, members: Collection[int]) -> list[str]:
    return [name for name, value in mapping_of(item).items() if isinstance(name, str) and id(value) in members]


def mapping_of(item: Any) -> dict[Any, Any]:
    """A dict, or the attributes of an object."""
    return item if type(item) is dict else getattr(item, "__dict__", {})
