"""Rows for the stages: `load` reads, encodes, filters and caches them; `batches` turns them into tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlhf.config import ConfigError, DataConfig
from rlhf.data import cache
from rlhf.data.batches import Order, collate, pack, rank_slice
from rlhf.data.encode import Encoded, Encoder
from rlhf.data.sources import locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Demonstration", "Kind", "Order", "Preference", "Prompt", "Split", "collate", "load", "pack", "rank_slice"]

Kind = Literal["sft", "preferences", "prompts"]


@dataclass(frozen=True)
class Prompt:
    """`text` is the prompt as written, for people and reward functions; `prompt_ids` include the chat template."""

    text: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Demonstration:
    """`answer_ids` end with the end token."""

    text: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Preference:
    """Both answers end with the end token."""

    text: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


ROW_TYPES = {"sft": Demonstration, "preferences": Preference, "prompts": Prompt}


@dataclass(frozen=True)
class Split:
    """Rows of the kind's type. `dropped` counts by reason; the reasons of a held-out source are `heldout/...`."""

    train: list[Any]
    heldout: list[Any]
    dropped: dict[str, int]


def load(
    kind: Kind,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    is_builder: bool = True,
    barrier: Callable[[], None] | None = None,
) -> Split:
    """Rows for training and held-out rows, encoded. With several ranks all of them call this, one as the builder.

    The others wait until the builder's cache is there; without one (none configured, or on another machine's disk)
    they encode for themselves. So a ConfigError is raised on every rank, and none waits for one that has gone. It is
    raised for a source that is missing, malformed or empty, also after filtering, and for a tokenizer that does not
    fit the config.
    """
    wait = barrier or (lambda: None)
    if not is_builder:
        wait()
    try:
        return _load(kind, config, tokenizer, seed)
    finally:
        if is_builder:
            wait()


def _load(kind: Kind, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Split:
    source, heldout_source = getattr(config, kind), getattr(config, f"{kind}_heldout")
    if source is None:
        raise ConfigError(
            [f"data.{kind}=null, but this stage reads it. Write data.{kind}=<file, folder or hub data set>."]
        )
    encoder = Encoder(config, tokenizer)
    rows, dropped = _encoded(kind, f"data.{kind}", source, encoder)
    if heldout_source is not None:
        heldout, heldout_dropped = _encoded(kind, f"data.{kind}_heldout", heldout_source, encoder)
        dropped = dropped | {f"heldout/{reason}": count for reason, count in heldout_dropped.items()}
    else:
        rows, heldout = _put_aside(rows, config.heldout_fraction, seed, f"data.{kind}={source}")
    row_type = ROW_TYPES[kind]
    train, heldout = ([row_type(row.text, row.prompt_ids, *row.answers) for row in part] for part in (rows, heldout))
    return Split(train, heldout, dropped)


def _encoded(kind: Kind, setting: str, given: str, encoder: Encoder) -> cache.Rows:
    config = encoder.config
    source = locate(setting, given)
    answer_columns = {
        "sft": [config.answer_column],
        "preferences": [config.chosen_column, config.rejected_column],
        "prompts": [],
    }[kind]
    columns = [config.prompt_column, *answer_columns]

    def build() -> cache.Rows:
        return encoder.encode(source.rows(columns), config.prompt_column, answer_columns)

    if config.cache is None:
        kept, dropped = build()
    else:
        name = cache.key(
            source=source.fingerprint(),
            tokenizer=cache.tokenizer_state(encoder.tokenizer),
            use_chat_template=config.use_chat_template,
            system=config.system,
            columns=columns,
            lengths=[config.max_prompt_length, config.max_answer_length],
        )
        kept, dropped = cache.cached(Path(config.cache), f"{kind}-{name}", len(answer_columns), build)
    if not kept:
        raise ConfigError([f"{setting}={given} gives no rows: {_why_none(dropped)}."])
    return kept, dropped


def _why_none(dropped: dict[str, int]) -> str:
    if not dropped:
        return "it is empty"
    counts = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
    return f"all were dropped ({counts}). Raise data.max_prompt_length or data.max_answer_length, or name other columns"


def _put_aside(rows: list[Encoded], fraction: float, seed: int, given: str) -> tuple[list[Encoded], list[Encoded]]:
    """Rows for training and held-out rows, both in the source's order. Any fraction above 0 puts a row aside."""
    count = max(1, round(fraction * len(rows))) if fraction > 0 else 0
    if count == len(rows):
        problem = f"{given} has {count} usable row(s), and data.heldout_fraction={fraction} leaves none for training."
        raise ConfigError([f"{problem} Give more rows, or write data.heldout_fraction=0."])
    aside = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    train = [row for i, row in enumerate(rows) if i not in aside]
    return train, [rows[i] for i in sorted(aside)]
