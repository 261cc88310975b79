"""The demo's data config with small files in the place of its own, and a tokenizer in which a character is a token."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.config import DataConfig
from rlhf.data.sources import REPOSITORY
from rlhf.models.tiny_tokenizer import build_tiny_tokenizer


@pytest.fixture
def tokenizer():
    return build_tiny_tokenizer(261)


@pytest.fixture
def data_config() -> Callable[..., DataConfig]:
    """The shipped data config; sources and cache are off unless given."""
    shipped = yaml.safe_load((REPOSITORY / "conf/data/demo.yaml").read_text())
    sources = ("sft", "preferences", "prompts")
    off = dict.fromkeys([*sources, *(f"{source}_heldout" for source in sources), "cache"])
    return lambda **changes: DataConfig(**{**shipped, **off, **changes})


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: Iterable[Any], name: str = "rows.jsonl") -> str:
        """Strings are written as they are, everything else as JSON."""
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write
