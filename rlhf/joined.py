"""Launchers that start every rank themselves: torchrun, deepspeed, srun, mpirun. No torch here."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.config import ConfigError


@dataclass(frozen=True)
class Joined:
    """This process's place among the ranks that a launcher started; `local` is within its machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # of the machine that holds rank 0
    port: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed's env:// and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def joined(environ: Mapping[str, str] = os.environ) -> Joined | None:
    """This process's place when a launcher started it as one of several ranks; None when ranks are ours to start.

    torchrun's and deepspeed's variables come first: they may run under srun. Raises ConfigError where several machines
    take part and nothing says which one holds rank 0.
    """
    if {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        world_size = int(environ["WORLD_SIZE"])
        # LOCAL_WORLD_SIZE is torchrun's, LOCAL_SIZE deepspeed's.
        local = environ.get("LOCAL_WORLD_SIZE") or environ.get("LOCAL_SIZE") or str(world_size)
        return _place(environ, int(environ["RANK"]), world_size, int(environ["LOCAL_RANK"]), int(local), None)
    # Only srun sets the STEP variables: in a batch script SLURM_PROCID is 0 and SLURM_NTASKS counts processes that
    # nobody has started. One task is an ordinary process, which is how submitit runs the cells of a sweep.
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and {"SLURM_PROCID", "SLURM_LOCALID"} <= environ.keys():
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1")
        if tasks % nodes:
            problem = f"srun started {tasks} tasks on {nodes} nodes, and each needs equally many; use --ntasks-per-node"
            raise ConfigError([problem])
        host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
        rank, local_rank = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
        return _place(environ, rank, tasks, local_rank, tasks // nodes, host or None)
    if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        rank, world_size, local_rank, local = (
            int(environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        )
        return _place(environ, rank, world_size, local_rank, local, None)
    return None


def _place(
    environ: Mapping[str, str], rank: int, world_size: int, local_rank: int, local_world_size: int, host: str | None
) -> Joined:
    host = environ.get("MASTER_ADDR") or host or ("127.0.0.1" if local_world_size == world_size else None)
    if host is None:
        problem = (
            f"The launcher started {world_size} ranks on several machines, and MASTER_ADDR does not say which of them "
            "holds rank 0; set it, for mpirun with -x MASTER_ADDR=<host>"
        )
        raise ConfigError([problem])
    port = environ.get("MASTER_PORT")
    return Joined(rank, world_size, local_rank, local_world_size, host, int(port) if port else _port(environ))


def _port(environ: Mapping[str, str]) -> int:
    """The same port in all ranks of a job, and most likely another one in the next job on these machines."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    job = " ".join(environ.get(name, "") for name in names)
    return 20000 + zlib.crc32(job.encode()) % 10000  # below Linux's ephemeral ports, which start at 32768


def first_host(nodes: str) -> str:
    """The first machine of Slurm's list: "gpu[03-07,12],cpu1" gives "gpu03"."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def without_local_rank(arguments: list[str]) -> list[str]:
    """The command line without the --local_rank=N that deepspeed adds and Hydra refuses (A49)."""
    kept = list[str]()
    skip = False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in ("--local_rank", "--local-rank"):
            skip = True
        elif not argument.startswith(("--local_rank=", "--local-rank=")):
            kept.append(argument)
    return kept
