import pytest

from rlhf.hardware import detect, selected

UUIDS = ["GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3"]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        ("0,2", [0, 2]),
        ("2,0", [2, 0]),
        (" 1 , 0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,3,1", [0]),  # CUDA stops at the first that does not exist
        ("0,0", [0]),
        ("NoDevFiles", []),
        ("GPU-cc,0", [2, 0]),
        ("GPU-aa", []),  # two begin like this
        ("MIG-5678,MIG-1234", ["MIG-5678", "MIG-1234"]),
    ],
)
def test_visible_devices_as_cuda_reads_them(visible, chosen):
    assert selected(visible, UUIDS) == chosen


def test_no_visible_device_is_a_machine_without_gpus():
    here = detect({"CUDA_VISIBLE_DEVICES": ""})
    assert here.gpus == () and here.joined is None
    assert here.host_memory_bytes > 2**28


def test_a_launchers_ranks_are_noticed():
    place = detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"})
    assert place.joined is not None and (place.joined.rank, place.joined.nodes) == (5, 2)
