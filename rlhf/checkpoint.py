"""Checkpoints that are whole or absent: written beside, renamed when complete, verified before use.

checkpoints/step_00000010/ holds one folder per role in the framework's own format, rank_<k>.safetensors with the random
state, state.json with everything else, and manifest.json with size and crc32 of every file, written last.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rlhf import distributed
from rlhf.frameworks import Engine


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while block := opened.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _listing(folder: Path) -> dict[str, list[int]]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json")
    return {str(p.relative_to(folder)): [p.stat().st_size, _crc32(p)] for p in files}


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if it is whole."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return "it has no readable manifest.json"
    found = _listing(folder)
    for name, expected in manifest.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != expected:
            return f"{name} was changed or cut after it was written"
    return None


class Checkpoints:
    """The checkpoints of one stage. `best` names one that pruning keeps (A34)."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder / "checkpoints", keep
        self.best: str | None = None

    def save(
        self, step: int, engines: Mapping[str, Engine], state: dict[str, Any], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Collective. `tensors` are this rank's own."""
        name = f"step_{step:08d}"
        aside = self.folder / f"{name}.part"
        if distributed.rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        distributed.barrier()
        for engine in engines.values():
            engine.save_state(aside)
        save_file({**_random_state(), **tensors}, aside / f"rank_{distributed.rank()}.safetensors")
        distributed.barrier()
        if distributed.rank() == 0:
            (aside / "state.json").write_text(
                json.dumps({"step": step, "world_size": distributed.world_size(), **state})
            )
            (aside / "manifest.json").write_text(json.dumps(_listing(aside)))
            final = self.folder / name
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            self._prune()
        distributed.barrier()

    def _whole_names(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("step_*") if not p.name.endswith(".part"))

    def _prune(self) -> None:
        for old in self._whole_names()[: -self.keep]:
            if old.name != self.best:
                shutil.rmtree(old)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint and a message for every damaged one that was passed over. Collective."""
        found: tuple[str | None, list[str]] = (None, [])
        if distributed.rank() == 0:
            messages = []
            for folder in reversed(self._whole_names()):
                problem = damage(folder)
                if problem is None:
                    found = (str(folder), messages)
                    break
                messages.append(f"skipped checkpoint {folder.name}: {problem}")
            else:
                found = (None, messages)
        path, messages = distributed.from_rank_zero(found)
        return (Path(path) if path else None), messages

    def load(self, folder: Path, engines: Mapping[str, Engine]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Puts engines and random state back; returns `state` and this rank's `tensors`."""
        state = json.loads((folder / "state.json").read_text())
        if state["world_size"] != distributed.world_size():
            raise ValueError(
                f"{folder} was written by {state['world_size']} ranks and this run has {distributed.world_size()}; "
                "resume with the same number of ranks"
            )
        for engine in engines.values():
            engine.load_state(folder)
        tensors = load_file(folder / f"rank_{distributed.rank()}.safetensors")
        _set_random_state(tensors)
        return state, {name: tensor for name, tensor in tensors.items() if not name.startswith("random.")}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["random.cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(tensors: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
