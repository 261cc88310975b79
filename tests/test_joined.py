from __future__ import annotations

import pytest

from rlhf.config import ConfigError
from rlhf.joined import first_host, joined, without_local_rank

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "99",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_ADDR": "b", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (TORCHRUN, (5, 8, 1, 4, 2, "a")),
        (DEEPSPEED, (3, 4, 1, 2, 2, "b")),
        (SRUN, (6, 8, 2, 4, 2, "gpu07")),
        (SRUN | {"MASTER_ADDR": "set"}, (6, 8, 2, 4, 2, "set")),
        (MPIRUN, (1, 2, 1, 2, 1, "127.0.0.1")),
        (SRUN | TORCHRUN, (5, 8, 1, 4, 2, "a")),  # torchrun under srun
    ],
)
def test_place(environ: dict[str, str], place: tuple[object, ...]) -> None:
    found = joined(environ)
    assert found is not None
    assert place == (
        found.rank, found.world_size, found.local_rank, found.local_world_size, found.nodes, found.address
    )  # fmt: skip
    assert found.environment()["MASTER_PORT"] == environ.get("MASTER_PORT", str(found.port))
    assert joined(found.environment()) == found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4"},  # a container's machine number, not a rank
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},  # submitit, srun --pty
        {name: value for name, value in SRUN.items() if "STEP" not in name},  # a batch script
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_not_joined(environ: dict[str, str]) -> None:
    assert joined(environ) is None


def test_port_is_one_per_job() -> None:
    ports = {joined(SRUN | {"SLURM_PROCID": str(rank)}).port for rank in range(8)}  # pyright: ignore
    other = joined(SRUN | {"SLURM_JOB_ID": "78"})
    assert other is not None
    assert len(ports) == 1 and other.port not in ports


def test_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR does not say"):
        joined(MPIRUN | {"OMPI_COMM_WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="7 tasks on 2 nodes"):
        joined(SRUN | {"SLURM_STEP_NUM_TASKS": "7"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a", "a"), ("a,b", "a"), ("gpu[03-07,12],cpu1", "gpu03"), ("gpu[3,5]", "gpu3"), ("n[1-2]-ib,x", "n1-ib"),
        ("rack-2-node7", "rack-2-node7"), ("", ""),
    ],
)  # fmt: skip
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_without_local_rank() -> None:
    given = ["--local_rank=3", "stage=sft", "--local-rank", "2", "-m", "zero=2", "--local_rank", "0"]
    assert without_local_rank(given) == ["stage=sft", "-m", "zero=2"]
