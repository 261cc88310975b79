"""Around Hydra's main: launchers that start every rank, and messages instead of tracebacks."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rlhf import hydra_choices as hydra_choices  # importing it is what makes zero=2 work, also in submitit's jobs
from rlhf.config import ConfigError
from rlhf.joined import Joined, joined, without_local_rank
from rlhf.outcome import OK, REFUSED, interrupted_by

# Of a launcher's ranks only the first makes a folder and logs into it.
WITHOUT_OUTPUT = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled")


def run(main: Callable[[], None]) -> int:
    """Call Hydra's `main` with the command line as it should be; returns the exit code, unless `main` exits itself."""
    # Hydra then raises what it would otherwise print under a header and with advice about this variable.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Jobs of hydra/launcher=submitit_* import rlhf, wherever train.py was started.
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        sys.argv = arguments(sys.argv, joined())
        main()
    except KeyboardInterrupt:
        return interrupted_by(signal.SIGINT)
    except (HydraException, OmegaConfBaseException, ValueError, ConfigError) as error:
        if wants_traceback:  # main() lets no exception of its own through: this is about composing
            raise
        return refuse(error)
    return OK


def arguments(argv: list[str], place: Joined | None) -> list[str]:
    """The command line for Hydra. Raises ConfigError for a sweep under a launcher (A51)."""
    argv = without_local_rank(argv)
    if place is None:
        return argv
    if {"-m", "--multirun"} & set(argv):
        raise ConfigError(
            [
                f"A launcher started this sweep (-m) in {place.world_size} processes, and each cell of a sweep starts "
                "ranks of its own; write python train.py -m ... without torchrun, deepspeed, srun or mpirun"
            ]
        )
    if place.rank == 0:
        return argv
    names = [override.split("=")[0] for override in WITHOUT_OUTPUT]
    return [argument for argument in argv if argument.split("=")[0] not in names] + list(WITHOUT_OUTPUT)


def tell(warnings: Iterable[str]) -> None:
    if _speaks():
        for warning in warnings:
            print(f"Warning: {warning}", file=sys.stderr)


def refuse(error: Exception) -> int:
    """Say what is wrong with the configuration; returns the exit code."""
    problems = _problems(error)
    if _speaks():
        if len(problems) > 1:
            problems = [f"{number}. {problem}" for number, problem in enumerate(problems, start=1)]
        print("The configuration is refused:", *problems, sep="\n", file=sys.stderr)
    return REFUSED


def _speaks() -> bool:
    """Of several ranks that say the same, one."""
    try:
        place = joined()
    except ConfigError:
        return True
    return place is None or place.rank == 0


def _problems(error: BaseException) -> list[str]:
    """Our own sentences when Hydra or OmegaConf wrapped them, otherwise their message and its cause's."""
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for link in chain:
        if isinstance(link, ConfigError):
            return link.problems
    cause = error.__cause__
    return [str(error) if cause is None else f"{error}\n{cause}"]
