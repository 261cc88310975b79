import gc

import pytest
import torch

from rlhf.memory import Usage
from rlhf.memory.growth import MIB, QUIET_STEPS, WINDOW, GrowthWatch, census, live_tensors, steady_growth

CPU = torch.device("cpu")
NEEDED = 2 * WINDOW + 1  # boundaries until a warning


def watch_steps(usages: list[Usage], contexts: list[dict] | None = None, device: torch.device = CPU) -> list[str]:
    watch = GrowthWatch(16 * MIB, device)
    warnings = []
    for step, usage in enumerate(usages, start=1):
        warnings += watch.observe(step, usage, contexts[step - 1] if contexts else {})
    return warnings


def usage(allocated_mib: float, cached_mib: float = 0, outside_mib: float = 0) -> Usage:
    reserved = allocated_mib + cached_mib
    return Usage(int(allocated_mib * MIB), int(reserved * MIB), int((reserved + outside_mib) * MIB))


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ([0, 10, 20, 30, 40], 10.0),
        ([0, 0, 900, 900, 900], 0.0),  # a jump
        ([0, 0, 0, 900, 900], 0.0),  # a jump where the halves meet
        ([50, 0, 50, 0, 50], 0.0),  # up and down
        ([40, 30, 20, 10, 0], 0.0),
    ],
)
def test_growth_is_neither_jump_nor_noise(values, rate):
    assert steady_growth(values) == rate


def test_slow_growth_is_no_warning():
    assert watch_steps([usage(15 * step) for step in range(40)]) == []


def test_growth_that_stops_is_no_warning():
    """As in the first steps, in which optimizer and allocator settle."""
    assert watch_steps([usage(20 * min(step, WINDOW + 1)) for step in range(40)]) == []


def test_a_warning_comes_once_in_a_while():
    assert len(watch_steps([usage(20 * step) for step in range(NEEDED - 1)])) == 0
    assert len(watch_steps([usage(20 * step) for step in range(NEEDED)])) == 1
    assert len(watch_steps([usage(20 * step) for step in range(NEEDED + QUIET_STEPS - 1)])) == 1
    assert len(watch_steps([usage(20 * step) for step in range(2 * NEEDED + QUIET_STEPS)])) == 2


def test_cache_and_outside_are_told_apart_from_tensors():
    (cached,) = watch_steps([usage(100, cached_mib=20 * step) for step in range(NEEDED)])
    assert cached.startswith("Memory that torch's allocator reserves but no tensor uses grew by 20.0 MiB per step")
    (outside,) = watch_steps([usage(100, outside_mib=20 * step) for step in range(NEEDED)])
    assert outside.startswith("Device memory outside torch's allocator grew by 20.0 MiB per step from step 7 to 13")


def test_the_context_is_set_beside_the_growth():
    lengths = [{"sequence_length": 100 + 10 * step} for step in range(NEEDED)]
    (warning,) = watch_steps([usage(20 * step) for step in range(NEEDED)], lengths)
    assert warning.endswith("Meanwhile sequence_length went from 160 to 220.")


class Rollouts:
    """Keeps what it should have dropped (article C13)."""

    def __init__(self) -> None:
        self.old_logprobs: list[torch.Tensor] = []


def test_the_tensors_that_became_more_are_named():
    rollouts = Rollouts()
    steady = torch.ones(64 * MIB // 4)  # larger than what grows
    watch = GrowthWatch(0.5 * MIB, CPU)
    warnings = []
    for step in range(NEEDED):
        rollouts.old_logprobs.append(torch.ones(3, 5, MIB // 16))
        warnings += watch.observe(step, usage(step * 15 / 16 * 4), {})
    assert steady.numel() > 0
    (warning,) = warnings
    shape = f"[3, 5, {MIB // 16}]"
    assert f"Most of it: 22.5 MiB more in tensors of shape {shape} and type float32, {NEEDED} now" in warning
    assert "held as 'old_logprobs'" in warning
    assert "autograd graph" not in warning


def test_a_graph_that_is_kept_is_told_from_tensors_that_are():
    """The losses are scalars; what they hold is memory that no Python name leads to (article C14)."""
    losses = []
    weight = torch.ones(512, 512, requires_grad=True)
    watch = GrowthWatch(0.5 * MIB, CPU)
    warnings = []
    for step in range(NEEDED):
        losses.append((weight * 2).exp().exp().sum())
        warnings += watch.observe(step, usage(2 * step), {})
    (warning,) = warnings
    assert "12.0 MiB of it are in tensors that only an autograd graph holds" in warning


def test_a_storage_counts_once_whatever_looks_at_it():
    whole = torch.ones(7, 1031)
    gc.collect()  # ages `whole`, so that its view is visited first
    younger, older = whole[1], torch.ones(5, 1033)
    views = [younger, older.view(-1)[:5]]
    sizes = census(live_tensors(CPU))
    assert sizes[(7, 1031), torch.float32] == 7 * 1031 * 4
    assert sizes[(5, 1033), torch.float32] == 5 * 1033 * 4
    assert all(sizes[tuple(view.shape), view.dtype] < 5 * 1033 * 4 for view in views)
