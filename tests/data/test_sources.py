"""Files, folders and hub data sets; what is said about rows that cannot be read."""

import json
from pathlib import Path

import datasets.config
import pyarrow
import pyarrow.parquet
import pytest

from rlhf.config import ConfigError
from rlhf.data.sources import REPOSITORY, FileSource, HubSource, locate

ROWS = [{"prompt": f"question {i}", "answer": f"answer {i}", "more": i} for i in range(5)]
COLUMNS = ["prompt", "answer"]


def read(given: str, columns: list[str] = COLUMNS) -> list[tuple[str, dict]]:
    return locate("data.sft", given).rows(columns)


def problems_of(given: str, columns: list[str] = COLUMNS) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(given, columns)
    return caught.value.problems


@pytest.fixture
def hub_folder(tmp_path, monkeypatch) -> str:
    """A folder laid out like a hub data set with two configs; `datasets` keeps its cache in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hub"
    for config, rows in {"full": ROWS, "small": ROWS[:2]}.items():
        (folder / config).mkdir(parents=True)
        for split, part in {"train": rows, "test": rows[:1]}.items():
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / config / f"{split}.parquet")
    files = [
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {split}\n    path: {config}/{split}.parquet\n" for split in ("train", "test"))
        for config in ("full", "small")
    ]
    (folder / "README.md").write_text("---\nconfigs:\n" + "".join(files) + "---\n")
    return str(folder)


def test_jsonl_and_parquet_give_the_same_rows(tmp_path, write_jsonl):
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    expected = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS]
    jsonl = write_jsonl(ROWS)
    assert read(jsonl) == [(f"{jsonl}:{i}", values) for i, values in enumerate(expected, 1)]
    assert read(str(parquet)) == [(f"{parquet} row {i}", values) for i, values in enumerate(expected, 1)]


def test_folder_is_read_in_the_order_of_its_names(tmp_path, write_jsonl):
    write_jsonl(ROWS[2:4], "many/b.jsonl")
    write_jsonl(ROWS[:2], "many/a.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[4:]), tmp_path / "many/c.parquet")
    (tmp_path / "many/notes.txt").write_text("not data")
    assert [values["prompt"] for _, values in read(str(tmp_path / "many"))] == [row["prompt"] for row in ROWS]


def test_relative_paths_are_looked_for_here_then_in_the_repository(tmp_path, write_jsonl, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = locate("data.sft", "rlhf/demo_data/sft.jsonl")
    assert isinstance(shipped, FileSource) and shipped.files == [REPOSITORY / "rlhf/demo_data/sft.jsonl"]
    write_jsonl(ROWS, "rlhf/demo_data/sft.jsonl")
    nearer = locate("data.sft", "rlhf/demo_data/sft.jsonl")
    assert isinstance(nearer, FileSource) and nearer.files == [tmp_path / "rlhf/demo_data/sft.jsonl"]


def test_messages_null_blank_lines_and_a_byte_order_mark(tmp_path):
    file = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hällo"}]
    lines = [json.dumps({"prompt": messages}), "", json.dumps({"prompt": None}), "  "]
    file.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert read(str(file), ["prompt"]) == [(f"{file}:1", {"prompt": messages}), (f"{file}:3", {"prompt": None})]


def test_every_bad_line_is_reported_with_its_number(write_jsonl):
    good = {"prompt": "p", "answer": "a"}
    lines = {
        2: ('{"prompt": "p", "answer": ', "this line is not JSON in UTF-8"),
        3: (["p", "a"], "this line holds list; every line must be an object"),
        5: ({"prompt": "p", "reply": "a"}, "there is no column 'answer'; there are: prompt, reply."),
        6: ({"prompt": 7, "answer": "a"}, "column 'prompt' holds int; it must be text or a list of messages."),
        7: ({"prompt": [{"role": "user"}], "answer": "a"}, "is not a message with the texts 'role' and 'content'."),
        8: ({"prompt": "p", "answer": "\ud800"}, "column 'answer' holds half of a surrogate pair"),
    }
    file = write_jsonl([lines[number][0] if number in lines else good for number in range(1, 10)])
    problems = sorted(problems_of(file), key=lambda problem: problem.split(":")[1])
    assert len(problems) == len(lines) == 6
    for problem, (number, (_, message)) in zip(problems, sorted(lines.items()), strict=True):
        assert problem.startswith(f"{file}:{number}: ") and message in problem


def test_bytes_that_are_not_utf8_are_a_bad_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    (problem,) = problems_of(str(file), ["prompt"])
    assert problem.startswith(f"{file}:2: this line is not JSON in UTF-8")


def test_only_twenty_bad_lines_are_listed(write_jsonl):
    problems = problems_of(write_jsonl(["broken"] * 33))
    assert len(problems) == 21
    assert problems[19].split(":")[1] == "20"
    assert problems[20] == "13 more rows cannot be read."


def test_column_that_no_row_has_is_one_problem_that_lists_the_columns(tmp_path, write_jsonl):
    jsonl = write_jsonl(ROWS)
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), parquet)
    for file in (jsonl, str(parquet)):
        (problem,) = problems_of(file, ["prompt", "response"])
        assert f"{file} has no column 'response'; it has: answer, more, prompt. Set data.*_column" in problem


def test_parquet_rows_of_a_wrong_type_and_a_damaged_parquet_file(tmp_path):
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    problems = problems_of(str(file), ["prompt", "more"])
    assert len(problems) == 5
    assert problems[4] == f"{file} row 5: column 'more' holds int; it must be text or a list of messages."
    file.write_bytes(file.read_bytes()[:-20])
    (problem,) = problems_of(str(file))
    assert f"{file} cannot be read as parquet" in problem


def test_what_is_not_there_is_named_with_the_places_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of("nowhere/rows.jsonl")
    assert "data.sft=nowhere/rows.jsonl does not exist" in problem
    assert str(tmp_path / "nowhere/rows.jsonl") in problem and str(REPOSITORY / "nowhere/rows.jsonl") in problem
    (tmp_path / "empty").mkdir()
    (problem,) = problems_of("empty")
    assert "data.sft=empty is a folder without .jsonl or .parquet files" in problem
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    (problem,) = problems_of("rows.csv")
    assert "data.sft=rows.csv is neither a .jsonl nor a .parquet file" in problem


def test_hub_data_set_with_config_and_split(hub_folder):
    assert isinstance(locate("data.sft", f"{hub_folder}:full"), HubSource)
    sizes = {"full": 5, "small": 2, "full:test": 1, "full:train[:3]": 3}
    for given, size in sizes.items():
        rows = read(f"{hub_folder}:{given}")
        assert [values for _, values in rows] == [{name: row[name] for name in COLUMNS} for row in ROWS[:size]]
    assert rows[2][0] == f"{hub_folder}:full:train[:3] row 3"


def test_hub_folder_follows_content(hub_folder):
    def fingerprint(given: str) -> str:
        return locate("data.sft", f"{hub_folder}:{given}").fingerprint()

    first = fingerprint("full")
    assert first == fingerprint("full")
    assert len({first, fingerprint("small"), fingerprint("full:test")}) == 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:4]), Path(hub_folder) / "full/train.parquet")
    assert fingerprint("full") != first
    assert len(read(f"{hub_folder}:full")) == 4


def test_hub_problems(hub_folder, monkeypatch):
    (problem,) = problems_of(f"{hub_folder}:full", ["prompt", "response"])
    assert f"{hub_folder}:full has no column 'response'; it has: answer, more, prompt." in problem
    (problem,) = problems_of(f"{hub_folder}:huge")
    assert f"data.sft={hub_folder}:huge cannot be loaded." in problem and "'full', 'small'" in problem
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (problem,) = problems_of("nobody/nothing")
    assert "There is no such file or folder" in problem and "nobody/nothing" in problem


def test_file_fingerprint_follows_content_not_name(write_jsonl):
    first = locate("data.sft", write_jsonl(ROWS, "a.jsonl")).fingerprint()
    assert locate("data.sft", write_jsonl(ROWS, "b.jsonl")).fingerprint() == first
    assert (
        locate("data.sft", write_jsonl([*ROWS[:4], {**ROWS[4], "answer": "answer 5"}], "a.jsonl")).fingerprint()
        != first
    )
