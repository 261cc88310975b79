"""`load` from the files to the split, and its cache (A41)."""

import json
import multiprocessing
import os
import random
import threading
from pathlib import Path

import pytest
import yaml

from rlhf import data
from rlhf.config import ConfigError
from rlhf.data import cache
from rlhf.data.encode import Encoded, Encoder
from rlhf.data.sources import REPOSITORY
from rlhf.models.tiny_tokenizer import build_tiny_tokenizer

DEMONSTRATIONS = [{"prompt": f"question {i}", "answer": f"answer {i}"} for i in range(20)]


@pytest.fixture
def encodings(monkeypatch) -> list[int]:
    """The number of rows of each encoding that really took place."""
    calls: list[int] = []
    encode = Encoder.encode

    def counted(self, rows, *columns):
        calls.append(len(rows))
        return encode(self, rows, *columns)

    monkeypatch.setattr(Encoder, "encode", counted)
    return calls


def test_rows_of_each_kind(tokenizer, data_config, write_jsonl):
    row = {"prompt": "p", "answer": "a", "chosen": "c", "rejected": "r"}
    file = write_jsonl([row])
    config = data_config(sft=file, preferences=file, prompts=file, heldout_fraction=0.0, system=None)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text)["input_ids"])

    prompt = ids("<|user|>p<|end|><|assistant|>")
    expected: dict[data.Kind, object] = {
        "sft": data.Demonstration("p", prompt, ids("a<|end|>")),
        "preferences": data.Preference("p", prompt, ids("c<|end|>"), ids("r<|end|>")),
        "prompts": data.Prompt("p", prompt),
    }
    for kind, loaded in expected.items():
        assert data.load(kind, config, tokenizer, seed=0) == data.Split([loaded], [], {})


def test_heldout_source_and_its_own_counts(tokenizer, data_config, write_jsonl):
    train = write_jsonl([*DEMONSTRATIONS, {"prompt": "", "answer": "a"}], "train.jsonl")
    heldout = write_jsonl([{"prompt": "other", "answer": "a"}, {"prompt": "p", "answer": ""}], "heldout.jsonl")
    split = data.load("sft", data_config(sft=train, sft_heldout=heldout), tokenizer, seed=0)
    assert [row.text for row in split.train] == [row["prompt"] for row in DEMONSTRATIONS]
    assert [row.text for row in split.heldout] == ["other"]
    assert split.dropped == {"prompt_empty": 1, "heldout/answer_empty": 1}


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.001, 1), (0.1, 2), (0.5, 10), (0.9, 18)])
def test_heldout_fraction(tokenizer, data_config, write_jsonl, fraction, count):
    config = data_config(sft=write_jsonl(DEMONSTRATIONS), heldout_fraction=fraction)
    first, again, other = (data.load("sft", config, tokenizer, seed) for seed in (1, 1, 2))
    assert len(first.heldout) == count
    texts = [row.text for row in first.train + first.heldout]
    assert sorted(texts) == sorted(row["prompt"] for row in DEMONSTRATIONS)
    assert first == again
    assert (first != other) == (count > 0)


def test_nothing_to_train_on(tokenizer, data_config, write_jsonl):
    def problem_of(**changes) -> str:
        with pytest.raises(ConfigError) as caught:
            data.load("sft", data_config(**changes), tokenizer, seed=0)
        (problem,) = caught.value.problems
        return problem

    file = write_jsonl([*DEMONSTRATIONS, {"prompt": "", "answer": "a"}])
    problem = problem_of(sft=file, max_prompt_length=3)
    assert f"data.sft={file} gives no rows: all were dropped (prompt_empty 1, prompt_too_long 20)." in problem
    one = write_jsonl(DEMONSTRATIONS[:1], "one.jsonl")
    assert "has 1 usable row(s), and data.heldout_fraction=0.1 leaves none" in problem_of(sft=one)
    none = write_jsonl([], "none.jsonl")
    assert "data.sft_heldout=" in (problem := problem_of(sft=file, sft_heldout=none)) and "it is empty" in problem
    assert "data.sft=null, but this stage reads it" in problem_of()


def test_cache_hit_gives_the_same_without_encoding(tokenizer, data_config, write_jsonl, tmp_path, encodings):
    rows = [*DEMONSTRATIONS, {"prompt": "", "answer": "a"}]
    config = data_config(sft=write_jsonl(rows), cache=str(tmp_path / "cache"))
    first = data.load("sft", config, tokenizer, seed=0)
    assert encodings == [21] and first.dropped == {"prompt_empty": 1}
    assert data.load("sft", config, build_tiny_tokenizer(261), seed=0) == first
    assert data.load("sft", config, tokenizer, seed=1).train != first.train
    assert data.load("sft", config.model_copy(update={"cache": None}), tokenizer, seed=0) == first
    assert encodings == [21, 21]
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".rows"]


def test_cache_misses_when_anything_changes_that_the_rows_depend_on(
    tokenizer, data_config, write_jsonl, tmp_path, encodings
):
    rows = [{**row, "reply": row["answer"], "question": row["prompt"]} for row in DEMONSTRATIONS]
    config = data_config(sft=write_jsonl(rows), cache=str(tmp_path / "cache"))
    data.load("sft", config, tokenizer, seed=0)
    renamed = Path(write_jsonl(rows, "copy.jsonl"))
    data.load("sft", config.model_copy(update={"sft": str(renamed)}), tokenizer, seed=0)
    assert encodings == [20], "a copy of the same data has the same rows"

    changes = [
        {"system": None},
        {"system": "Be kind."},
        {"use_chat_template": False},
        {"prompt_column": "question"},
        {"answer_column": "reply"},
        {"max_prompt_length": 63},
        {"max_answer_length": 47},
    ]
    for number, change in enumerate(changes, 2):
        data.load("sft", config.model_copy(update=change), tokenizer, seed=0)
        assert len(encodings) == number, change
    encodings.clear()

    def template(other):
        other.chat_template += " "

    def end(other):
        other.eos_token = "<|pad|>"

    def token(other):
        other.add_tokens(["question"])

    for number, change in enumerate((template, end, token), 1):
        other = build_tiny_tokenizer(261)
        change(other)
        data.load("sft", config, other, seed=0)
        assert len(encodings) == number, change
    encodings.clear()

    # One letter, same size, same time of change.
    before = renamed.stat()
    renamed.write_text(renamed.read_text().replace("answer 7", "answer X"))
    os.utime(renamed, ns=(before.st_atime_ns, before.st_mtime_ns))
    data.load("sft", config.model_copy(update={"sft": str(renamed)}), tokenizer, seed=0)
    assert encodings == [20]


def rows_of(count: int) -> cache.Rows:
    return [Encoded(f"text {i}", (i, i + 1), ((i,), (2, i))) for i in range(count)], {"answers_equal": count}


def test_damaged_cache_is_built_again(tmp_path, caplog):
    expected = rows_of(30)
    cache.cached(tmp_path, "pairs", 2, lambda: expected)
    file = tmp_path / "pairs.rows"
    whole = file.read_bytes()
    generator = random.Random(0)
    places = generator.sample(range(len(whole)), 60)
    damaged = [whole[:place] for place in places[:30]]
    damaged += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in places[30:]]
    for content in [b"", b"not rows", *damaged]:
        file.write_bytes(content)
        caplog.clear()
        assert cache.cached(tmp_path, "pairs", 2, lambda: expected) == expected
        assert f"The data cache {file} is damaged" in caplog.text
        assert file.read_bytes() == whole
    caplog.clear()
    assert cache.cached(tmp_path, "pairs", 2, lambda: pytest.fail("the cache is whole again")) == expected
    assert caplog.text == ""


def test_failed_build_or_write_leaves_no_file(tmp_path, monkeypatch):
    with pytest.raises(ConfigError):
        cache.cached(tmp_path / "a", "rows", 2, lambda: (_ for _ in ()).throw(ConfigError(["bad line"])))
    assert not (tmp_path / "a").exists()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left.*data\.cache=null"):
        cache.cached(tmp_path / "b", "rows", 2, lambda: rows_of(3))
    assert list((tmp_path / "b").iterdir()) == []


def race(folder: str, both_missed) -> None:
    def build() -> cache.Rows:
        both_missed.wait(60)
        return rows_of(2000)

    assert cache.cached(Path(folder), "pairs", 2, build) == rows_of(2000)


def test_two_processes_race_for_one_cache(tmp_path):
    context = multiprocessing.get_context("spawn")
    both_missed = context.Barrier(2)
    other = context.Process(target=race, args=(str(tmp_path), both_missed))
    other.start()
    race(str(tmp_path), both_missed)
    other.join(60)
    assert other.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.rows"]
    assert cache.cached(tmp_path, "pairs", 2, lambda: pytest.fail("both had built it")) == rows_of(2000)


def on_four_ranks(load) -> list:
    """The results, or errors, of `load(is_builder, barrier)` on four threads that share a barrier; rank 0 is last."""
    barrier = threading.Barrier(4)
    results: list = [None] * 4

    def one_rank(rank: int) -> None:
        try:
            results[rank] = load(rank == 0, lambda: barrier.wait(30))
        except ConfigError as error:
            results[rank] = error

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in (1, 2, 3, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(result is not None for result in results)
    return results


def test_rank_zero_builds_and_the_others_read(data_config, write_jsonl, tmp_path, encodings):
    config = data_config(sft=write_jsonl(DEMONSTRATIONS), cache=str(tmp_path / "cache"))
    results = on_four_ranks(lambda *ranks: data.load("sft", config, build_tiny_tokenizer(261), 0, *ranks))
    assert encodings == [20]
    assert results == [data.load("sft", config, build_tiny_tokenizer(261), 0)] * 4


def test_without_a_cache_every_rank_encodes(data_config, write_jsonl, encodings):
    config = data_config(sft=write_jsonl(DEMONSTRATIONS))
    results = on_four_ranks(lambda *ranks: data.load("sft", config, build_tiny_tokenizer(261), 0, *ranks))
    assert encodings == [20] * 4
    assert all(result == results[0] for result in results)


def test_no_rank_waits_for_a_builder_that_failed(data_config, write_jsonl, tmp_path):
    config = data_config(sft=write_jsonl([json.dumps(DEMONSTRATIONS[0]), "broken"]), cache=str(tmp_path / "cache"))
    results = on_four_ranks(lambda *ranks: data.load("sft", config, build_tiny_tokenizer(261), 0, *ranks))
    assert [type(result) for result in results] == [ConfigError] * 4
    assert len({str(result) for result in results}) == 1 and "rows.jsonl:2: this line is not JSON" in str(results[0])


def test_shipped_data_loads_whole(tokenizer, data_config):
    """The byte-level tokenizer needs more room than the demo's, so lengths are raised."""
    shipped = yaml.safe_load((REPOSITORY / "conf/data/demo.yaml").read_text())
    config = data_config(**{**shipped, "cache": None, "max_prompt_length": 400, "max_answer_length": 400})
    for kind in ("sft", "preferences", "prompts"):
        split = data.load(kind, config, tokenizer, seed=0)
        lines = [(REPOSITORY / shipped[name]).read_text().splitlines() for name in (kind, f"{kind}_heldout")]
        assert [len(split.train), len(split.heldout)] == [len(part) for part in lines]
        assert split.dropped == {} and min(len(split.train), len(split.heldout)) > 0
