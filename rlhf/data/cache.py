"""Encoded rows kept on disk between runs (A41).

One file per source: the sha256 of the rest, then a parquet table. So whatever happened to the file, it is either what
was written or it is built again. Files are written beside and renamed: processes that race write the same file twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet

from rlhf.config import ConfigError
from rlhf.data.encode import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Goes up when the same input would be encoded differently, or stored differently.
FORMAT = 1
DIGEST_BYTES = 32

Rows = tuple[list[Encoded], dict[str, int]]


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of all that the tokenizer saves: vocabulary, merges, special tokens, chat template; not of its name."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def key(**parts: Any) -> str:
    """`parts` are all that the encoded rows depend on."""
    return hashlib.sha256(json.dumps({"format": FORMAT, **parts}, sort_keys=True).encode()).hexdigest()[:32]


def cached(folder: Path, name: str, answers: int, build: Callable[[], Rows]) -> Rows:
    """The rows of file `name`, or `build()`, which is then kept there. `answers` is the number of answers per row.

    Raises ConfigError when the folder cannot be written.
    """
    file = folder / f"{name}.rows"
    if file.exists():
        try:
            return _read(file, answers)
        except (OSError, ValueError) as error:
            log.warning("The data cache %s is damaged (%s) and is built again.", file, error)
    kept, dropped = build()
    try:
        _write(file, _table(kept, dropped, answers))
    except OSError as error:
        problem = (
            f"data.cache={folder} cannot be written ({error}). Name another folder, or write data.cache=null for none."
        )
        raise ConfigError([problem]) from error
    return kept, dropped


def _table(kept: Sequence[Encoded], dropped: dict[str, int], answers: int) -> pyarrow.Table:
    ids = pyarrow.list_(pyarrow.int32())
    columns = {
        "text": pyarrow.array([row.text for row in kept], pyarrow.string()),
        "prompt_ids": pyarrow.array([row.prompt_ids for row in kept], ids),
        **{f"answer_{i}": pyarrow.array([row.answers[i] for row in kept], ids) for i in range(answers)},
    }
    return pyarrow.table(columns).replace_schema_metadata({"dropped": json.dumps(dropped)})


def _write(file: Path, table: pyarrow.Table) -> None:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    body = sink.getvalue()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    try:
        with part.open("wb") as opened:
            opened.write(hashlib.sha256(body).digest())
            opened.write(body)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _read(file: Path, answers: int) -> Rows:
    """Raises ValueError when the content is not what was written."""
    content = memoryview(file.read_bytes())
    body = content[DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != content[:DIGEST_BYTES]:
        raise ValueError("its checksum does not fit")
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(body))
    names = ["text", "prompt_ids", *(f"answer_{i}" for i in range(answers))]
    columns = [table.column(name).to_pylist() for name in names]
    rows = [Encoded(text, tuple(prompt), tuple(map(tuple, ends))) for text, prompt, *ends in zip(*columns, strict=True)]
    return rows, json.loads(table.schema.metadata[b"dropped"])
