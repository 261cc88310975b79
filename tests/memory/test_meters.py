import pytest

from rlhf.memory.meters import MigInstance, nvml_name

A, B = "8932f937-d72c-4106-c12f-20bd9faed9f6", "0bbf1a0e-7c4a-11ee-b962-0242ac120002"
FIRST, SECOND = MigInstance("MIG-1f00", 1, 0), MigInstance("MIG-2a77", 2, 0)


@pytest.mark.parametrize("visible", ["", "1", "1,0", f"GPU-{B},GPU-{A}", "GPU-0bbf"])
def test_a_card_is_found_by_uuid_however_it_was_made_visible(visible):
    assert nvml_name(B, visible, {f"GPU-{A}": [], f"GPU-{B}": []}) == f"GPU-{B}"


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("MIG-2a77", "MIG-2a77"),
        ("MIG-2a", "MIG-2a77"),
        (f"MIG-GPU-{A}/2/0", "MIG-2a77"),
        (f"MIG-GPU-{A}/1/0", "MIG-1f00"),
        ("0", "MIG-1f00"),
        ("", "MIG-1f00"),
    ],
)
def test_a_slice_is_found_when_cuda_names_its_card(visible, name):
    assert nvml_name(A, visible, {f"GPU-{A}": [FIRST, SECOND], f"GPU-{B}": []}) == name


def test_a_slice_is_found_when_cuda_names_it():
    assert nvml_name("2a77", "", {f"GPU-{A}": [FIRST, SECOND]}) == "MIG-2a77"


def test_an_unknown_device_is_an_error():
    with pytest.raises(LookupError):
        nvml_name(B, "0", {f"GPU-{A}": []})
