"""What NVML tells train.py against what torch sees in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rlhf.hardware import detect, visible_gpus

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHOW = """
import json, torch
found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[gpu.name, gpu.total_memory, gpu.major + gpu.minor / 10] for gpu in found]))
"""


def test_the_same_gpus_as_torch():
    uuid = visible_gpus(None)[0].uuid
    seen = 0
    for visible in ("0", "0,1", uuid, uuid[:12], "", "99", None):
        env = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        shown = subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True, check=True)
        theirs = json.loads(shown.stdout)
        ours = detect(env).gpus
        assert [(gpu.name, gpu.compute_capability) for gpu in ours] == [(name, version) for name, _, version in theirs]
        for gpu, (_, memory_bytes, _) in zip(ours, theirs, strict=True):
            # The driver keeps some for itself, which NVML counts and CUDA does not.
            assert 0 <= gpu.memory_bytes - memory_bytes < 0.05 * memory_bytes
        seen += 1
    assert seen == 7
