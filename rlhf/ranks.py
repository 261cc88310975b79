"""Starts this node's ranks of one stage through torch's elastic launcher: python -m rlhf.ranks <folder> <parent's pid>.

A process of its own, between train.py and the ranks, so that train.py needs no torch and outlives whatever happens
here. It ends with 0 when every rank returned, otherwise with the exit code of the rank that fell first.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from rlhf import failures
from rlhf.outcome import FAILED, INTERRUPTED, OK, interrupted_by

# After one rank fell, the others get this long to raise and record their own error. They may be inside a collective
# that never returns, and they take SIGTERM for "save and stop at the next step": only SIGKILL ends them.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.05
STARTED, RETURNED = "start", "returned"  # the phases before and after the entrypoint


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` (a pid) ends, however it ends. Linux; elsewhere nothing."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


class Node:
    """This node's ranks while they run: ends them together, passes SIGTERM on."""

    def __init__(self, folder: Path, devices: int):
        self.folder = folder
        self.devices = devices
        self.ranks: list[BaseProcess] = []
        self.fallen: list[BaseProcess] = []
        self.fell_at = 0.0

    def watch(self) -> None:
        """Thread: once any rank of the job has failed, kill the ones of this node that are left."""
        while len(self.ranks) < self.devices:
            time.sleep(POLL_SECONDS)
            self.ranks = multiprocessing.active_children()
        while not (self._fallen() or any((self.folder / "ranks").glob("error_*.json"))):
            time.sleep(POLL_SECONDS)
        self.fell_at = time.time()
        time.sleep(POLL_SECONDS)  # a peer's exception may be seen before the death that caused it
        self.fallen = self._fallen()
        time.sleep(GRACE_SECONDS)
        for rank in self._running():
            self._send(rank, signal.SIGKILL)
        if not self._running():
            time.sleep(GRACE_SECONDS)
            # The agent waits for ever for the return value of a rank that left through os._exit(0).
            self.record_deaths()
            os._exit(FAILED)

    def _fallen(self) -> list[BaseProcess]:
        """The ranks that ended before their entrypoint returned. Sentinels only: reaping is the agent's."""
        ended = [rank for rank in self.ranks if rank not in self._running()]
        if not ended:
            return []
        returned = {b["pid"] for b in failures.heartbeats(self.folder).values() if b["phase"] == RETURNED}
        return [rank for rank in ended if rank.pid not in returned]

    def _running(self) -> list[BaseProcess]:
        ended = multiprocessing.connection.wait([rank.sentinel for rank in self.ranks], timeout=0)
        return [rank for rank in self.ranks if rank.sentinel not in ended]

    def _send(self, rank: BaseProcess, signum: int) -> None:
        assert rank.pid is not None
        try:
            os.kill(rank.pid, signum)
        except ProcessLookupError:
            pass  # it ended in between

    def stop(self, signum: int, _frame: FrameType | None) -> None:
        """Signal handler: ask the ranks to save and stop; without ranks there is nothing to wait for."""
        if len(self.ranks) < self.devices:
            sys.exit(interrupted_by(signum))
        for rank in self._running():
            self._send(rank, signal.SIGTERM)

    def record_deaths(self) -> None:
        """Write an error for each rank that fell first without leaving one."""
        here = socket.gethostname()
        numbers = {b["pid"]: k for k, b in failures.heartbeats(self.folder).items() if b["host"] == here}
        for process in self.fallen:
            # Not in `numbers`: it died while Python was starting, before it knew its rank.
            rank = numbers.get(process.pid, self.ranks.index(process))
            failures.write_death(self.folder, rank, process.exitcode, self.fell_at)


def start(folder: Path, entrypoint: Callable[[str], None], devices: int, nodes: int, rendezvous: str | None) -> int:
    """Run `entrypoint(str(folder))` in `devices` processes of this node; returns the exit code of the whole.

    `entrypoint` is an importable function (the processes are spawned). With several nodes each calls this with the
    same `rendezvous` (host:port) and the same folder on a shared disk.
    """
    node = Node(folder, devices)
    signal.signal(signal.SIGTERM, node.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent turns Ctrl-C into SIGTERM

    # Seconds to import, so after the handlers.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs every SIGTERM and a traceback of its own; what happened is in ranks/error_<k>.json.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.multiprocessing").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=devices,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous or "127.0.0.1:0",
        local_addr=_own_address(rendezvous) if rendezvous else "127.0.0.1",
        max_restarts=0,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle="SIGHUP,SIGQUIT",  # SIGTERM is ours
    )
    threading.Thread(target=node.watch, daemon=True).start()
    try:
        elastic_launch(config, _rank)(entrypoint, str(folder))
    except ChildFailedError as failed:
        node.record_deaths()
        _, failure = failed.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else FAILED
    return OK


def _own_address(rendezvous: str) -> str:
    """This machine's address on the way to `rendezvous`: other nodes can reach it, with or without a name server."""
    host, _, port = rendezvous.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # a datagram socket: sends nothing
        return probe.getsockname()[0]


def _rank(entrypoint: Callable[[str], None], folder: str) -> None:
    """One rank, from its first line to its last."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = int(os.environ["RANK"])
    if rank != 0:
        _redirect_output(Path(folder) / "ranks" / f"rank_{rank}.log")
    failures.write_heartbeat(Path(folder), rank, STARTED)
    try:
        entrypoint(folder)
    except Exception as error:
        failures.write_error(Path(folder), rank, error)
        sys.exit(FAILED)  # the parent prints it
    except SystemExit as leaving:
        # An interrupted rank has saved as it was asked to: no failure, so nobody ends the ranks that are still saving.
        if leaving.code not in (None, OK, *INTERRUPTED):
            raise
    failures.write_heartbeat(Path(folder), rank, RETURNED)


def _redirect_output(path: Path) -> None:
    """Send standard output and error to `path`, also what C libraries write."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _work(folder: str) -> None:
    from rlhf.worker import main  # here: only ranks need it

    main(folder)


def main() -> int:
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    from rlhf.config import from_yaml

    hardware = from_yaml(folder / "config.yaml").hardware
    assert hardware.devices is not None
    return start(folder, _work, hardware.devices, hardware.nodes, hardware.rendezvous)


if __name__ == "__main__":
    sys.exit(main())
