"""Files that other processes read while they are written, or that a kill may cut short. No torch here."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Replace `path` whole: a reader, or a kill at any moment, sees the old file or the new one.

    `durable`: also a machine that loses power; that waits for the disk.
    """
    part = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`write_text` of a JSON object, with numbers as `plain` has them."""
    write_text(path, json.dumps(plain(content), indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None when there is no such file or it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def plain(value: Any) -> Any:
    """`value` with the numbers that JSON does not have as "nan", "inf" and "-inf", which `float()` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
