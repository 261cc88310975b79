import os
import subprocess
import sys

import pytest

from rlhf.memory import Breakdown, Term, Usage, format_gib, prepare_allocator


def test_usage_tells_torch_and_device_apart():
    usage = Usage(allocated_bytes=60, reserved_bytes=100, device_bytes=150)
    assert (usage.fragmentation_bytes, usage.outside_torch_bytes) == (40, 50)


def test_a_phase_peaks_on_the_rank_that_holds_most():
    breakdown = Breakdown(
        (
            Term(0, "actor", "update", "gradients", 10),
            Term(0, "critic", "update", "parameters", 5),
            Term(1, "actor", "update", "gradients", 30),
            Term(1, "actor", "save", "parameters", 1),
        )
    )
    assert breakdown.peaks() == {(0, "update"): 15, (1, "update"): 30, (1, "save"): 1}
    assert breakdown.peak_by_phase() == {"update": 30, "save": 1}


def test_join_sets_peaks_side_by_side():
    predicted = Breakdown((Term(0, "actor", "update", "gradients", 10), Term(0, "actor", "load", "parameters", 3)))
    measured = Breakdown((Term(0, "actor", "update", "allocated", 12), Term(0, "-", "-", "allocated", 1)))
    assert predicted.join(measured) == {(0, "update"): (10, 12), (0, "load"): (3, None), (0, "-"): (None, 1)}


def test_rows_of_another_vocabulary_are_refused():
    with pytest.raises(TypeError):
        Breakdown.from_rows([{"rank": 0, "phase": "update", "bytes": 3}])


def test_gib_has_two_digits():
    assert format_gib(3 * 2**29) == "1.50 GiB"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_stand(monkeypatch, name):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64")
    prepare_allocator()
    assert {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")} == {
        name: "max_split_size_mb:64"
    }


def test_expandable_segments_are_the_default(monkeypatch):
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")  # so that it is removed afterwards
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    prepare_allocator()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_words_need_no_torch():
    code = "import sys, rlhf.memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
