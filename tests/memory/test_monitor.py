"""Attribution, rows and heartbeats of the monitor. What a meter reads is scripted, except in tests of real memory."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from rlhf.config import MonitorConfig
from rlhf.memory import Breakdown, Usage
from rlhf.memory import monitor as monitor_module
from rlhf.memory.meters import HostMeter, Reading
from rlhf.memory.monitor import Monitor

CPU = torch.device("cpu")
MIB = 2**20


class ScriptedMeter:
    """An allocator and a device whose state the test sets. It counts what the monitor asks of it."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.outside = self.peak_allocated = self.peak_reserved = 0
        self.reads = self.resets = self.synchronizations = self.emptied = 0

    def hold(self, allocated: int, outside: int = 0) -> None:
        self.allocated, self.outside = allocated, outside
        self.reserved = max(self.reserved, allocated)
        self.peak_allocated = max(self.peak_allocated, allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def read(self) -> Reading:
        self.reads += 1
        device = self.reserved + self.outside
        return Reading(
            Usage(self.allocated, self.reserved, device), Usage(self.peak_allocated, self.peak_reserved, device)
        )

    def reset_peak(self) -> None:
        self.resets += 1
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def synchronize(self) -> None:
        self.synchronizations += 1

    def empty_cache(self) -> float:
        self.emptied += 1
        self.reserved = self.allocated
        return 0.25


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> ScriptedMeter:
    scripted = ScriptedMeter()
    monkeypatch.setattr(monitor_module, "meter_for", lambda device: scripted)
    return scripted


def open_monitor(folder: Path, rank: int = 0, **changes) -> Monitor:
    config = MonitorConfig(**{"sample_seconds": 3600.0, "empty_cache": False, "growth_warning_mib": 16.0} | changes)
    return Monitor(folder, config, CPU, rank, world_size=4)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def peak(monitor: Monitor, phase: str, role: str = "-") -> int:
    return monitor.peaks()[phase][role]["allocated_bytes"]


def test_a_peak_is_charged_to_the_innermost_phase(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with monitor.phase("update", "actor"):
        meter.hold(700)
        meter.hold(100)
        with monitor.phase("score", "reward"):
            assert monitor.open_phase() == ("score", "reward")
            meter.hold(900)
            meter.hold(50)
        assert monitor.open_phase() == ("update", "actor")
        meter.hold(800)
        meter.hold(0)
    assert peak(monitor, "score", "reward") == 900
    assert peak(monitor, "update", "actor") == 800
    assert monitor.open_phase() == ("-", None)
    meter.hold(30)
    assert monitor.allocated_bytes() == 30
    assert peak(monitor, "-") == 30
    monitor.close()


def test_the_outer_peak_before_an_inner_phase_is_kept(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with monitor.phase("update"):
        meter.hold(700)
        meter.hold(0)
        with monitor.phase("score"):
            meter.hold(10)
    assert (peak(monitor, "update"), peak(monitor, "score")) == (700, 10)
    monitor.close()


def test_an_exception_leaves_peak_and_place_behind(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with pytest.raises(MemoryError), monitor.phase("update", "critic"), monitor.phase("score", "reference"):
        meter.hold(900)
        raise MemoryError
    assert peak(monitor, "score", "reference") == 900
    assert monitor.open_phase() == ("score", "reference")
    monitor.close()
    assert ("score", 900) in [(row["phase"], row["allocated_bytes"]) for row in rows_of(tmp_path / "memory.jsonl")]


def test_a_later_exception_is_not_taken_for_an_earlier_one(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with pytest.raises(KeyError), monitor.phase("update", "actor"):
        try:
            with monitor.phase("generate"):
                raise MemoryError
        except MemoryError:
            pass
        raise KeyError
    assert monitor.open_phase() == ("update", "actor")
    with monitor.phase("save"):
        pass
    assert monitor.open_phase() == ("-", None)
    monitor.close()


def test_what_lies_outside_torch_is_added_to_its_exact_peak(tmp_path, meter):
    """Reserved memory rose and fell between two readings of the device, which therefore missed the peak."""
    monitor = open_monitor(tmp_path)
    meter.hold(100, outside=40)
    with monitor.phase("generate"):
        meter.hold(600, outside=40)
        meter.hold(100, outside=40)
        meter.empty_cache()
    numbers = monitor.peaks()["generate"]["-"]
    assert numbers["reserved_bytes"] == 600
    assert numbers["device_bytes"] == 640
    assert numbers["outside_torch_bytes"] == 40
    assert numbers["fragmentation_bytes"] == 0
    monitor.close()


def test_the_thread_sees_the_device_between_the_ends_of_a_phase(tmp_path, meter):
    monitor = open_monitor(tmp_path, sample_seconds=0.001)
    with monitor.phase("generate"):
        meter.hold(100, outside=5000)
        wanted, waiting = meter.reads + 2, threading.Event()
        for _ in range(10_000):
            if meter.reads >= wanted:
                break
            waiting.wait(0.001)
        meter.hold(100, outside=0)
    assert monitor.peaks()["generate"]["-"]["device_bytes"] == 5100
    monitor.close()


def test_rows_are_one_per_phase_role_and_step(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    for step in (1, 2):
        for micro_batch in range(3):
            for role in ("actor", "critic"):
                with monitor.phase("update", role):
                    meter.hold(100 * step + 10 * micro_batch)
                    meter.hold(0)
        monitor.boundary(step)
    with monitor.phase("save"):
        pass
    monitor.close()
    monitor.close()
    rows = [row for row in rows_of(tmp_path / "memory.jsonl") if row["phase"] != "-"]
    assert [(row["step"], row["phase"], row["role"], row["count"]) for row in rows] == [
        (1, "update", "actor", 3),
        (1, "update", "critic", 3),
        (2, "update", "actor", 3),
        (2, "update", "critic", 3),
        (2, "save", "-", 1),
    ]
    assert [row["allocated_bytes"] for row in rows] == [120, 120, 220, 220, 0]
    assert all(row["rank"] == 0 and row["seconds"] > 0 for row in rows)
    sizes = [value for row in rows for name, value in row.items() if name.endswith("_bytes")]
    assert len(sizes) == 5 * 5 and all(type(value) is int for value in sizes)


def test_seconds_of_nested_phases_add_up(tmp_path, meter, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(monitor_module.time, "perf_counter", lambda: float(next(clock)))
    monitor = open_monitor(tmp_path)
    with monitor.phase("update"), monitor.phase("score"):
        pass
    peaks = monitor.peaks()
    # Each change of phase reads the clock three times: end, then start anew after the monitor's own work.
    assert [peaks[phase]["-"]["seconds"] for phase in ("update", "score", "-")] == [2.0, 1.0, 2.0]
    monitor.close()


def test_a_boundary_inside_a_phase_counts_its_visit_once(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with monitor.phase("update"):
        meter.hold(700)
        meter.hold(0)
        monitor.boundary(1)
        meter.hold(300)
        meter.hold(0)
    monitor.boundary(2)
    rows = [row for row in rows_of(tmp_path / "memory.jsonl") if row["phase"] == "update"]
    assert [(row["step"], row["allocated_bytes"], row["count"]) for row in rows] == [(1, 700, 1), (2, 300, 0)]
    monitor.close()


def test_the_cache_is_emptied_between_phases_and_not_within_one(tmp_path, meter):
    monitor = open_monitor(tmp_path, empty_cache=True)
    for _ in range(2):
        with monitor.phase("generate", "actor"):
            meter.hold(500)
            meter.hold(0)
        for role in ("actor", "critic", "reference", "reward") * 3:
            with monitor.phase("score", role):
                pass
        with monitor.phase("update", "actor"), monitor.phase("save"):
            pass
    assert meter.emptied == 6
    peaks = monitor.peaks()
    assert peaks["generate"]["actor"]["empty_cache_seconds"] == 0.5
    assert peaks["score"]["actor"]["empty_cache_seconds"] == 0.5
    assert peaks["score"]["critic"]["empty_cache_seconds"] == 0.0
    assert peaks["score"]["actor"]["reserved_bytes"] == 0
    monitor.close()


def test_the_switch_keeps_the_cache(tmp_path, meter):
    monitor = open_monitor(tmp_path, empty_cache=False)
    with monitor.phase("generate"):
        meter.hold(500)
        meter.hold(0)
    with monitor.phase("score"):
        pass
    assert meter.emptied == 0
    assert monitor.peaks()["score"]["-"]["reserved_bytes"] == 500
    monitor.close()


def test_unknown_words_are_refused(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with pytest.raises(ValueError, match=r"phase 'rollout', role None: the phases are .*'generate'"):
        monitor.phase("rollout").__enter__()
    with pytest.raises(ValueError, match="role 'teacher'"):
        monitor.phase("score", "teacher").__enter__()
    monitor.close()


def test_work_per_visit_is_bounded(tmp_path, meter, monkeypatch):
    """Overhead in what is done, not in time: two readings, two resets, one wait, and no file within a phase."""
    written = []
    monkeypatch.setattr(monitor_module, "write_text", lambda path, text, durable: written.append(path.name))
    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: 0.0)
    monitor = open_monitor(tmp_path)
    with monitor.phase("update", "actor"):
        pass
    before = (meter.reads, meter.resets, meter.synchronizations, len(written))
    for _ in range(1000):
        with monitor.phase("update", "actor"):
            pass
    assert meter.reads - before[0] == 2000
    assert meter.resets - before[1] == 2000
    assert meter.synchronizations - before[2] == 1000
    assert len(written) == before[3] == 2
    monitor.boundary(1)
    assert len(rows_of(tmp_path / "memory.jsonl")) == 2
    monitor.close()


def test_each_rank_has_files_of_its_own(tmp_path, meter):
    monitor = open_monitor(tmp_path, rank=3)
    with monitor.phase("load", "actor"):
        pass
    monitor.close()
    assert {row["rank"] for row in rows_of(tmp_path / "ranks" / "memory_3.jsonl")} == {3}
    assert not (tmp_path / "memory.jsonl").exists()
    assert sorted(path.name for path in (tmp_path / "ranks").iterdir()) == ["memory_3.jsonl", "rank_3.json"]


def test_the_heartbeat_tells_where_the_rank_is(tmp_path, meter):
    path = tmp_path / "ranks" / "rank_0.json"
    monitor = open_monitor(tmp_path)
    monitor.boundary(7)
    with monitor.phase("update", "critic"):
        beat = json.loads(path.read_text())
        assert (beat["step"], beat["phase"], beat["role"]) == (7, "update", "critic")
        assert (beat["pid"], beat["rank"]) == (os.getpid(), 0)
        with monitor.phase("score", "reward"):
            assert json.loads(path.read_text())["phase"] == "score"
        assert json.loads(path.read_text())["phase"] == "update"
    monitor.close()


def test_the_heartbeat_keeps_the_place_of_a_failure(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with pytest.raises(MemoryError), monitor.phase("update"), monitor.phase("generate", "actor"):
        raise MemoryError
    beat = json.loads((tmp_path / "ranks" / "rank_0.json").read_text())
    assert (beat["phase"], beat["role"]) == ("generate", "actor")
    monitor.close()


def test_a_heartbeat_that_cannot_be_written_is_not_fatal(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    (tmp_path / "ranks" / "rank_0.json").unlink()
    (tmp_path / "ranks" / "rank_0.json").mkdir()
    with monitor.phase("update"):
        pass
    monitor.close()
    assert peak(monitor, "update") == 0


def test_rewind_drops_later_rows_and_a_torn_line(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    for step in range(1, 6):
        with monitor.phase("update"):
            pass
        monitor.boundary(step)
    monitor.close()
    path = tmp_path / "memory.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "rank": 0, "pha')
    resumed = open_monitor(tmp_path)
    resumed.rewind(3)
    assert [row["step"] for row in rows_of(path) if row["phase"] == "update"] == [1, 2, 3]
    with resumed.phase("update"):
        pass
    resumed.boundary(4)
    resumed.close()
    assert [row["step"] for row in rows_of(path) if row["phase"] == "update"] == [1, 2, 3, 4]


def test_the_breakdown_adds_up_to_the_device_peak(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    with monitor.phase("score", "actor"):
        meter.hold(600, outside=40)
        meter.hold(0, outside=40)
    with monitor.phase("score", "reward"):
        meter.hold(800, outside=50)
    breakdown = monitor.breakdown()
    assert breakdown.peak_by_phase()["score"] == 850 == monitor.peaks()["score"]["reward"]["device_bytes"]
    assert {(term.role, term.term): term.size_bytes for term in breakdown.terms if term.phase == "score"} == {
        ("reward", "allocated"): 800,
        ("reward", "fragmentation"): 0,
        ("reward", "outside torch"): 50,
    }
    assert Breakdown.from_rows(json.loads(json.dumps(breakdown.to_rows()))) == breakdown
    monitor.close()


def test_growth_is_reported_at_boundaries(tmp_path, meter):
    monitor = open_monitor(tmp_path)
    warnings = []
    for step in range(1, 30):
        meter.hold(step * 20 * MIB)
        warnings += monitor.boundary(step, sequence_length=256)
    assert len(warnings) == 1
    assert warnings[0].startswith("Resident memory grew by 20.0 MiB per step from step 7 to 13.")
    assert warnings[0].endswith("Meanwhile sequence_length stayed at 256.")
    monitor.close()


def test_the_host_meter_sees_a_peak_that_is_gone():
    """Real memory: 96 MiB taken and given back between two readings."""
    meter = HostMeter()
    if not meter._kernel_keeps_peak:
        pytest.skip("this system cannot reset a process's peak (no writable /proc/self/clear_refs)")
    before = meter.read().now.allocated_bytes
    block = torch.ones(96 * MIB // 4)
    del block
    reading = meter.read()
    assert reading.peak.allocated_bytes - before > 90 * MIB
    assert reading.now.allocated_bytes - before < 20 * MIB
    assert reading.now == Usage(*[reading.now.allocated_bytes] * 3)
    meter.reset_peak()
    assert meter.read().peak.allocated_bytes - before < 20 * MIB


def test_real_memory_by_phase(tmp_path):
    """On every system: what is held at the end of a phase is in its peak, beyond what was there at the start.

    Blocks above 32 MiB, since the C allocator may answer smaller ones with memory that is resident already.
    """
    monitor = open_monitor(tmp_path)
    with monitor.phase("load", "actor"):
        held = torch.ones(96 * MIB // 4)
    with monitor.phase("load", "critic"):
        more = torch.ones(64 * MIB // 4)
    actor, critic = peak(monitor, "load", "actor"), peak(monitor, "load", "critic")
    assert 90 * MIB < actor < 125 * MIB
    assert 60 * MIB < critic - actor < 80 * MIB
    assert held.numel() + more.numel() == 40 * MIB
    monitor.close()


def test_nothing_is_logged_in_an_ordinary_run(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG):
        monitor = open_monitor(tmp_path)
        with monitor.phase("load"):
            pass
        monitor.close()
    assert caplog.records == []
