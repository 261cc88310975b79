"""The words that everything about memory shares. No torch here: a plan must not need it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

PHASES = ("load", "initialise", "generate", "score", "update", "evaluate", "save")
ROLES = ("actor", "critic", "reference", "reward")
# Stands for the phase while none is open, and for the role of a phase that belongs to no single one.
NONE = "-"


class Usage(NamedTuple):
    """Memory of one device. `device_bytes` is what the whole device has in use beyond what it had at the start.

    On CPU all three are the resident memory beyond that at the start.
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int

    @property
    def outside_torch_bytes(self) -> int:
        """CUDA context, NCCL, other processes: what torch's allocator knows nothing of."""
        return max(0, self.device_bytes - self.reserved_bytes)

    @property
    def fragmentation_bytes(self) -> int:
        """What the allocator holds without any tensor in it."""
        return max(0, self.reserved_bytes - self.allocated_bytes)


class Term(NamedTuple):
    """One summand of a phase's peak on one rank, for instance the gradients of the actor."""

    rank: int
    role: str
    phase: str
    term: str
    size_bytes: int


@dataclass(frozen=True)
class Breakdown:
    """What is held when each phase is at its peak. The terms of one rank and phase add up to that peak."""

    terms: tuple[Term, ...]

    def peaks(self) -> dict[tuple[int, str], int]:
        """Bytes by (rank, phase)."""
        sums: dict[tuple[int, str], int] = {}
        for term in self.terms:
            key = (term.rank, term.phase)
            sums[key] = sums.get(key, 0) + term.size_bytes
        return sums

    def peak_by_phase(self) -> dict[str, int]:
        """Bytes of the rank that holds most, by phase."""
        highest: dict[str, int] = {}
        for (_, phase), size_bytes in self.peaks().items():
            highest[phase] = max(highest.get(phase, 0), size_bytes)
        return highest

    def join(self, other: Breakdown) -> dict[tuple[int, str], tuple[int | None, int | None]]:
        """The peaks of both by (rank, phase), None where one of them lacks it."""
        mine, theirs = self.peaks(), other.peaks()
        return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs}

    def to_rows(self) -> list[dict[str, Any]]:
        return [term._asdict() for term in self.terms]

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Breakdown:
        return cls(tuple(Term(**row) for row in rows))


def format_gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def prepare_allocator() -> None:
    """Turns on expandable segments (A08) unless the user has configured the allocator.

    Takes effect only before torch starts CUDA in this process; children inherit it.
    """
    # The second is the first one's older name, which torch still reads.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
