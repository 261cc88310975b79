"""Ranks for tests/test_launch.py. Run as a program it is rlhf.ranks with one of these functions as the entrypoint:

python launch_workers.py <function> <folder> <parent's pid> <devices> [<nodes> <host:port>]
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from rlhf import failures, files, ranks
from rlhf.config import ConfigError


def _rank() -> int:
    return int(os.environ["RANK"])


def _wait(condition) -> None:
    """Until `condition()`; the tests end the process when it never comes."""
    while not condition():
        time.sleep(0.02)


def _all_started(folder: str) -> bool:
    return len(failures.heartbeats(Path(folder))) == int(os.environ["WORLD_SIZE"])


def succeed(folder: str) -> None:
    print(f"rank {_rank()} speaks")
    os.system(f"echo rank {_rank()} speaks through a child")
    kept = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS")}
    (Path(folder) / f"seen_{_rank()}.json").write_text(json.dumps(kept))
    if _rank() == 0:
        files.write_json(Path(folder) / "result.json", {"status": "ok"})


def talk(folder: str) -> None:
    """A real collective over all ranks."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor(float(_rank() + 1))
    dist.all_reduce(total)
    if _rank() == 0:
        files.write_json(Path(folder) / "result.json", {"status": "ok", "sum": total.item()})
    dist.destroy_process_group()


def _hang(folder: str) -> None:
    """Like a collective that a missing peer never joins: also SIGTERM does not get through."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wait(lambda: False)


def second_rank_raises(folder: str) -> None:
    _wait(lambda: _all_started(folder))
    if _rank() == 1:
        raise RuntimeError("the cause")
    if _rank() == 0:
        _wait(lambda: (Path(folder) / "ranks" / "error_1.json").exists())
        raise ConnectionError("a consequence")
    _hang(folder)


def peer_notices_kill(folder: str) -> None:
    """Rank 1 is killed; rank 0 raises at once, before anybody can have noticed the kill."""
    _wait(lambda: _all_started(folder))
    if _rank() == 1:
        time.sleep(0.2)
        files.write_json(Path(folder) / "killed.json", {})
        os.kill(os.getpid(), signal.SIGKILL)
    _wait(lambda: (Path(folder) / "killed.json").exists())
    raise ConnectionError("connection closed by peer")


def leave_silently(folder: str) -> None:
    """Rank 1 leaves with exit code 0 in the middle of the work."""
    _wait(lambda: _all_started(folder))
    if _rank() == 1:
        os._exit(0)
    _hang(folder)


def leave_alone(folder: str) -> None:
    os._exit(0)


def leave_with_7(folder: str) -> None:
    _wait(lambda: _all_started(folder))
    if _rank() == 1:
        os._exit(7)
    _hang(folder)


def wrong_config(folder: str) -> None:
    raise ConfigError(["The first sentence.", "The second sentence."])


def out_of_memory(folder: str) -> None:
    if _rank() == 0:
        files.write_json(Path(folder) / "result.json", {"status": "oom"})
    sys.exit(3)


def hang(folder: str) -> None:
    _hang(folder)


def save_on_sigterm(folder: str) -> None:
    """As the real worker does: SIGTERM sets a flag, the step ends, the result says interrupted."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    (Path(folder) / f"ready_{_rank()}").touch()
    _wait(asked.is_set)
    (Path(folder) / f"saved_{_rank()}").touch()
    if _rank() == 0:
        files.write_json(Path(folder) / "result.json", {"status": "interrupted"})


if __name__ == "__main__":
    name, folder, parent, devices = sys.argv[1:5]
    nodes, rendezvous = (int(sys.argv[5]), sys.argv[6]) if len(sys.argv) > 5 else (1, None)
    ranks.die_with_parent(int(parent))
    sys.exit(ranks.start(Path(folder), globals()[name], int(devices), nodes, rendezvous))
