"""Where rows come from: .jsonl and .parquet files, folders of them, and data sets of the hub.

Both kinds of source give `fingerprint()`, which changes when the content does, and `rows(columns)`: (place, values),
where `place` is what a message calls the row (file:line) and `values` holds the columns asked for, checked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from rlhf.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
SUFFIXES = (".jsonl", ".parquet")
REPORTED_PROBLEMS = 20
SURROGATE = re.compile("[\ud800-\udfff]")

Row = tuple[str, dict[str, Any]]


class FileSource:
    def __init__(self, setting: str, files: list[Path]):
        self.setting, self.files = setting, files

    def fingerprint(self) -> str:
        return _digest(self.files)

    def rows(self, columns: list[str]) -> list[Row]:
        """Raises ConfigError with the place of every row that cannot be read, up to 20 of them."""
        problems: list[str] = []
        rows: list[Row] = []
        for file in self.files:
            if file.suffix == ".jsonl":
                rows += _json_rows(file, columns, problems)
            else:
                rows += _checked(_parquet_rows(self.setting, file, columns), problems)
        _raise_if(problems)
        return rows


class HubSource:
    """`name`, `name:config` or `name:config:split`; the split is `train` when left out, and may be a slice: `test[:9]`.

    With a config, the name may also be a local folder laid out like a hub data set.
    """

    def __init__(self, setting: str, given: str, tried: list[Path]):
        # Imported here: it takes longer than reading most files, and only hub data needs it.
        import datasets.config
        from datasets import Dataset, load_dataset

        self.setting, self.given = setting, given
        name, _, rest = given.partition(":")
        config, _, split = rest.partition(":")
        local = next((path for path in _candidates(name) if path.is_dir()), None)
        # `datasets` keys its cache on a hub data set's commit, but not on the content of a local folder.
        self.content = _digest(sorted(path for path in local.rglob("*") if path.is_file())) if local else ""
        folder = Path(datasets.config.HF_DATASETS_CACHE) / self.content
        try:
            data = load_dataset(str(local or name), config or None, split=split or "train", cache_dir=str(folder))
        # Whatever goes wrong in there (network, name, config, split, damaged files) has a type of its own.
        except Exception as error:
            looked = (
                "" if local else f"There is no such file or folder (tried {_listed(tried)}), and as a hub data set: "
            )
            problem = f"{setting}={given} cannot be loaded. {looked}{type(error).__name__}: {error}"
            raise ConfigError([problem]) from error
        assert isinstance(data, Dataset)
        self.data = data

    def fingerprint(self) -> str:
        return self.content + self.data._fingerprint

    def rows(self, columns: list[str]) -> list[Row]:
        _require(columns, self.data.column_names, self.setting, self.given)
        selected = enumerate(self.data.select_columns(columns), 1)
        problems: list[str] = []
        rows = list(_checked(((f"{self.given} row {n}", dict(values)) for n, values in selected), problems))
        _raise_if(problems)
        return rows


def locate(setting: str, given: str) -> FileSource | HubSource:
    """`setting` is the field that names the source, for messages. Raises ConfigError when nothing is there."""
    candidates = _candidates(given)
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        if _is_path(given):
            tried = _listed(candidates)
            raise ConfigError(
                [f"{setting}={given} does not exist (tried {tried}). Write the path of a file or folder."]
            )
        return HubSource(setting, given, candidates)
    if found.is_file():
        if found.suffix not in SUFFIXES:
            raise ConfigError(
                [f"{setting}={given} is neither a .jsonl nor a .parquet file. Convert it to one of them."]
            )
        return FileSource(setting, [found])
    files = sorted(path for path in found.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise ConfigError(
            [f"{setting}={given} is a folder without .jsonl or .parquet files ({found}). Name another one."]
        )
    return FileSource(setting, files)


def _is_path(given: str) -> bool:
    """Whether it cannot be the name of a hub data set, which is `name` or `owner/name`."""
    return ":" not in given and (
        Path(given).suffix in SUFFIXES or given.startswith((".", "/", "~")) or given.count("/") > 1
    )


def _candidates(given: str) -> list[Path]:
    path = Path(given).expanduser()
    return [path] if path.is_absolute() else list(dict.fromkeys((Path.cwd() / path, REPOSITORY / path)))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(file.suffix.encode() + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def _json_rows(file: Path, columns: list[str], problems: list[str]) -> Iterator[Row]:
    """Rows of a .jsonl file; lines that are none go into `problems`. A column that no line has is one problem."""
    missing: list[tuple[str, str]] = []
    names: set[str] = set()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{file}:{number}"
            try:
                values = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as error:
                problems.append(f"{place}: this line is not JSON in UTF-8 ({error}).")
                continue
            if not isinstance(values, dict):
                problems.append(
                    f"{place}: this line holds {type(values).__name__}; every line must be an object {{...}}."
                )
                continue
            names.update(values)
            absent = [column for column in columns if column not in values]
            if absent:
                there = _listed(values) or "none"
                missing += [
                    (column, f"{place}: there is no column {column!r}; there are: {there}.") for column in absent
                ]
                continue
            yield from _checked([(place, {column: values[column] for column in columns})], problems)
    problems += [message for column, message in missing if column in names]
    for column in dict.fromkeys(column for column, _ in missing if column not in names):
        problems.append(_no_column(str(file), column, names))


def _parquet_rows(setting: str, file: Path, columns: list[str]) -> Iterator[Row]:
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        _require(columns, parquet.schema_arrow.names, setting, str(file))
        number = 0
        for batch in parquet.iter_batches(columns=columns):
            for values in batch.to_pylist():
                number += 1
                yield f"{file} row {number}", values
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError([f"{setting}: {file} cannot be read as parquet ({error}). Write the file again."]) from error


def _checked(rows: Iterable[Row], problems: list[str]) -> Iterator[Row]:
    for place, values in rows:
        wrong = [
            f"{place}: column {name!r} {problem}." for name, value in values.items() if (problem := _wrong_type(value))
        ]
        problems += wrong
        if not wrong:
            yield place, values


def _wrong_type(value: Any) -> str | None:
    """What is wrong with a value that should be text or messages. None is text that is missing: it counts as empty."""
    if value is None or isinstance(value, str):
        return None if _is_unicode(value or "") else "holds half of a surrogate pair, which is no character"
    if not isinstance(value, list):
        return f"holds {type(value).__name__}; it must be text or a list of messages"
    for message in value:
        if not isinstance(message, dict) or not all(_is_unicode(message.get(key)) for key in ("role", "content")):
            return f"holds a list in which {str(message)[:60]!r} is not a message with the texts 'role' and 'content'"
    return None


def _is_unicode(value: Any) -> bool:
    """JSON can escape what UTF-8 cannot say, and tokenizers refuse it."""
    return isinstance(value, str) and not SURROGATE.search(value)


def _require(columns: list[str], there: list[str], setting: str, place: str) -> None:
    problems = [f"{setting}: {_no_column(place, column, there)}" for column in columns if column not in there]
    if problems:
        raise ConfigError(problems)


def _no_column(place: str, column: str, there: Iterable[str]) -> str:
    names = _listed(sorted(there)) or "none"
    return f"{place} has no column {column!r}; it has: {names}. Set data.*_column to the right name."


def _raise_if(problems: list[str]) -> None:
    if len(problems) > REPORTED_PROBLEMS:
        more = len(problems) - REPORTED_PROBLEMS
        problems = [*problems[:REPORTED_PROBLEMS], f"{more} more rows cannot be read."]
    if problems:
        raise ConfigError(problems)


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items)
