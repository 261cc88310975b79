"""The monitor on a real card. Whatever depends on how CUDA starts runs in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
import torch

from rlhf.config import MonitorConfig
from rlhf.memory.growth import WINDOW
from rlhf.memory.meters import cards_at_start
from rlhf.memory.monitor import Monitor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
GIB = 2**30


def cuda_tensor(mib: int) -> torch.Tensor:
    return torch.ones(mib * MIB // 4, device="cuda:0")


@pytest.fixture
def monitor(tmp_path):
    torch.cuda.empty_cache()
    config = MonitorConfig(sample_seconds=0.01, empty_cache=True, growth_warning_mib=16.0)
    monitor = Monitor(tmp_path, config, torch.device("cuda:0"), rank=0, world_size=1)
    yield monitor
    monitor.close()


def in_new_process(code: str, folder: Path, before: str = "", **environment: str) -> dict:
    """Runs `before`, opens `monitor`, runs `code`, and returns the dict that it leaves in `result`."""
    clean = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    program = f"""
from rlhf.memory import prepare_allocator
prepare_allocator()
import json, pathlib, torch
from rlhf.config import MonitorConfig
from rlhf.memory.meters import note_start
from rlhf.memory.monitor import Monitor
{before}
config = MonitorConfig(sample_seconds=1.0, empty_cache=True, growth_warning_mib=16.0)
monitor = Monitor(pathlib.Path({str(folder)!r}), config, torch.device("cuda:0"), 0, 1)
{code}
monitor.close()
print(json.dumps(result))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "NVML gives no reading" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("before", ["", "note_start(); torch.cuda.set_device(0); torch.ones(1, device='cuda')"])
def test_device_use_is_torch_and_the_cuda_context(tmp_path, before):
    result = in_new_process(
        """
with monitor.phase("load", "actor"):
    held = torch.ones(2**28, device="cuda:0")
result = monitor.peaks()["load"]["actor"]
""",
        tmp_path,
        before,
    )
    assert GIB <= result["allocated_bytes"] <= GIB + 512
    assert GIB <= result["reserved_bytes"] < GIB + 64 * MIB
    assert 100 * MIB < result["outside_torch_bytes"] < 3 * GIB  # the context and its kernels
    assert result["device_bytes"] == result["reserved_bytes"] + result["outside_torch_bytes"]


def test_segments_are_expandable(tmp_path):
    result = in_new_process(
        """
held = torch.ones(2**20, device="cuda:0")
result = {"expandable": [segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]}
""",
        tmp_path,
    )
    assert result["expandable"] and all(result["expandable"])


def test_the_card_is_the_same_however_it_was_made_visible(tmp_path):
    pynvml.nvmlInit()
    names = [pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    own = "GPU-" + str(torch.cuda.get_device_properties(0).uuid)
    assert own in names
    for visible in (own, own[:12], str(names.index(own))):
        result = in_new_process(
            "result = {'name': monitor._meter._nvml.name}",
            tmp_path,
            CUDA_VISIBLE_DEVICES=visible,
            CUDA_DEVICE_ORDER="PCI_BUS_ID",
        )
        assert result["name"] == own


def test_nested_peaks_and_an_emptied_cache(monitor):
    with monitor.phase("generate", "actor"):
        before = torch.cuda.memory_allocated(0)
        cuda_tensor(512)
        with monitor.phase("score", "reward"):
            cuda_tensor(64)
        cuda_tensor(256)
    with monitor.phase("update", "actor"):
        cuda_tensor(32)
    peaks = monitor.peaks()
    assert peaks["generate"]["actor"]["allocated_bytes"] - before == 512 * MIB
    assert peaks["score"]["reward"]["allocated_bytes"] - before == 64 * MIB
    assert peaks["update"]["actor"]["allocated_bytes"] - before == 32 * MIB
    assert peaks["generate"]["actor"]["reserved_bytes"] >= 512 * MIB
    # The nested phase lives with what its outer one reserved, the next outermost one does not.
    assert peaks["score"]["reward"]["reserved_bytes"] >= 512 * MIB
    assert peaks["update"]["actor"]["reserved_bytes"] < before + 128 * MIB
    assert peaks["update"]["actor"]["empty_cache_seconds"] > 0


def test_running_out_of_memory_leaves_place_and_peak(monitor):
    torch.cuda.set_per_process_memory_fraction(0.02, 0)
    limit = int(torch.cuda.get_device_properties(0).total_memory * 0.02)
    try:
        with (
            pytest.raises(torch.cuda.OutOfMemoryError),
            monitor.phase("update", "critic"),
            monitor.phase("generate", "actor"),
        ):
            kept = [cuda_tensor(256)]
            for _ in range(limit // (256 * MIB)):
                kept.append(cuda_tensor(256))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert monitor.open_phase() == ("generate", "actor")
    assert limit - 512 * MIB < monitor.peaks()["generate"]["actor"]["allocated_bytes"] <= limit


def test_a_leak_is_named(monitor):
    old_values, warnings = [], []
    holder = {"old_values": old_values}
    for step in range(1, 2 * WINDOW + 2):
        with monitor.phase("update", "actor"):
            old_values.append(cuda_tensor(24))
        warnings += monitor.boundary(step, sequence_length=256)
    (warning,) = warnings
    assert warning.startswith("Allocated memory grew by 24.0 MiB per step")
    assert f"{WINDOW * 24}.0 MiB more in tensors of shape [{24 * MIB // 4}] and type float32" in warning
    assert "held as 'old_values'" in warning
    assert len(holder["old_values"]) == 2 * WINDOW + 1


def test_a_graph_that_is_kept_is_told_from_tensors_that_are(monitor):
    weight = torch.ones(8 * MIB, device="cuda:0", requires_grad=True)
    losses, warnings = [], []
    for step in range(1, 2 * WINDOW + 2):
        with monitor.phase("update", "actor"):
            losses.append((weight * 2).exp().sum())
        warnings += monitor.boundary(step)
    (warning,) = warnings
    assert warning.startswith("Allocated memory grew by 32.0 MiB per step")
    assert f"{WINDOW * 32}.0 MiB of it are in tensors that only an autograd graph holds" in warning


def test_without_nvml_cuda_is_asked(tmp_path, monkeypatch, caplog):
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    cards_at_start.cache_clear()
    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    config = MonitorConfig(sample_seconds=1.0, empty_cache=False, growth_warning_mib=16.0)
    monitor = Monitor(tmp_path, config, torch.device("cuda:0"), rank=0, world_size=1)
    assert "NVML gives no reading" in caplog.text
    with monitor.phase("load"):
        held = cuda_tensor(256)
    free, total = torch.cuda.mem_get_info(0)
    assert monitor.peaks()["load"]["-"]["device_bytes"] >= total - free >= held.numel() * 4
    monitor.close()
