"""Replaced files: whole or not at all, and nothing left beside them."""

import json
import math
import os

import pytest

from rlhf.files import read_json, write_json, write_text


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_only_durable_writes_wait_for_the_disk(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(os, "fsync", waited.append)
    write_text(tmp_path / "heartbeat", "é", durable=False)
    assert waited == []
    write_text(tmp_path / "config", "é")
    assert len(waited) == 1
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in ("heartbeat", "config")] == ["é", "é"]


def test_numbers_that_json_lacks_are_strings(tmp_path):
    path = tmp_path / "numbers.json"
    write_json(path, {"list": [math.inf, 1.5], "inside": {"low": -math.inf, "none": math.nan}})
    assert json.loads(path.read_text()) == {"list": ["inf", 1.5], "inside": {"low": "-inf", "none": "nan"}}


@pytest.mark.parametrize("text", ['{"a": ', "[1]", None])
def test_what_is_no_object_is_read_as_none(tmp_path, text):
    path = tmp_path / "damaged.json"
    if text is not None:
        path.write_text(text)
    assert read_json(path) is None
