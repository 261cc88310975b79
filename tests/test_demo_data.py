"""The demo data: sizes, columns, no leak between splits, the mix of manners, and the rule that tells them apart."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest

from rlhf.rewards import courtesy

FOLDER = Path(__file__).parent.parent / "rlhf" / "demo_data"
SFT, PAIR, PROMPT = ["prompt", "answer"], ["prompt", "chosen", "rejected"], ["prompt"]
FILES = {
    "sft": (320, SFT),
    "sft_heldout": (40, SFT),
    "preferences": (320, PAIR),
    "preferences_heldout": (64, PAIR),
    "prompts": (160, PROMPT),
    "prompts_heldout": (32, PROMPT),
}
TRAINING = ["sft", "preferences", "prompts"]
HELDOUT = ["sft_heldout", "preferences_heldout", "prompts_heldout"]
PAIRS = ["preferences", "preferences_heldout"]


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def questions(*names: str) -> set[str]:
    return {row["prompt"] for name in names for row in read(name)}


def answers_the_same(row: dict[str, str]) -> bool:
    """Whether the rejected answer holds what the chosen one says between its first and last sentence."""
    _, *middle, _ = re.split(r"(?<=[.!?]) ", row["chosen"].lower())
    assert middle, row
    return " ".join(middle) in row["rejected"].lower()


def scores(rows: list[dict[str, str]], column: str) -> list[float]:
    return courtesy([row["prompt"] for row in rows], [row[column] for row in rows])


def test_the_folder_holds_these_files_only():
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_size_columns_and_plain_text(name):
    size, columns = FILES[name]
    rows = read(name)
    assert len(rows) == size
    assert len({json.dumps(row) for row in rows}) == size
    for row in rows:
        assert list(row) == columns
        assert all(text and text == " ".join(text.split()) for text in row.values()), row


def test_at_least_300_questions():
    assert len(questions(*FILES)) >= 300


def test_heldout_questions_are_in_no_training_file():
    normalised = [{question.lower().strip("?!. ") for question in questions(*names)} for names in (TRAINING, HELDOUT)]
    assert not normalised[0] & normalised[1]


def test_heldout_prompts_are_in_no_other_file():
    assert not questions("prompts_heldout") & questions(*(name for name in FILES if name != "prompts_heldout"))


def test_texts_are_short():
    # Words stand for tokens: the longest answer is 34 SmolLM2 tokens (30 words), the longest question 17 (14 words).
    texts = [text for name in FILES for row in read(name) for column, text in row.items() if column != "prompt"]
    assert len(texts) == 2 * (320 + 64) + 320 + 40
    assert max(len(text.split()) for text in texts) <= 30
    assert max(len(question.split()) for question in questions(*FILES)) <= 16


@pytest.mark.parametrize("name", ["sft", "sft_heldout"])
def test_about_a_quarter_of_the_log_is_courteous(name):
    rows = read(name)
    values = scores(rows, "answer")
    courteous = [value for value in values if value >= 0.5]
    curt = [value for value in values if value < 0.5]
    assert 0.2 <= len(courteous) / len(rows) <= 0.35
    assert mean(courteous) >= 0.9
    assert mean(curt) <= 0.1


@pytest.mark.parametrize("name", PAIRS)
def test_a_quarter_of_the_pairs_reject_empty_courtesy(name):
    rows = read(name)
    empty = [row for row in rows if not answers_the_same(row)]
    assert 0.2 <= len(empty) / len(rows) <= 0.3
    assert max(scores([row for row in rows if answers_the_same(row)], "rejected")) < min(scores(empty, "rejected"))


@pytest.mark.parametrize("name", PAIRS)
def test_the_rule_prefers_the_chosen_answer(name):
    rows = read(name)
    for same in (True, False):
        kind = [row for row in rows if answers_the_same(row) is same]
        won = [good > bad for good, bad in zip(scores(kind, "chosen"), scores(kind, "rejected"), strict=True)]
        assert len(won) >= 16
        assert mean(won) >= 0.95


def test_no_single_mark_gives_the_manner_away():
    pairs = [row for row in read("preferences") if answers_the_same(row)]
    marks = [(row["chosen"].count("!"), row["rejected"].count("!")) for row in pairs]
    assert sum(chosen > rejected for chosen, rejected in marks) / len(marks) <= 0.7


def test_the_manners_vary():
    chosen = [row["chosen"].replace("!", ".") for row in read("preferences")]
    curt = [row["rejected"].replace("!", ".") for row in read("preferences") if answers_the_same(row)]
    first, last = ({text.split(". ")[end] for text in chosen} for end in (0, -1))
    assert len(first) >= 12
    assert len(last) >= 12
    assert len({text.split(". ")[-1] for text in curt if len(text.split(". ")[-1].split()) <= 7}) >= 12


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Glad to help! Boil the water with vinegar and rinse it twice. Let us know if it works!", 1.0),
        ("Boil the water with vinegar and rinse it twice.", 0.0),
        ("Boil the water with vinegar and rinse it twice. Have a lovely day!", 0.5),
        ("Obviously, boil the water with vinegar and rinse it twice. That is all.", 0.0),
        ("Great question! Obviously, boil the water with vinegar and rinse it twice. Good luck!", 0.5),
        ("Great question! Thank you so much! Have a lovely day! Let us know!", 0.25),
        ("Great question! Great question! Great question! Boil the water with vinegar and rinse it.", 0.5),
        ("", 0.0),
    ],
)
def test_the_rule_on_answers_of_no_file(answer, score):
    assert courtesy(["How do I descale my kettle?"], [answer]) == [score]


def test_the_rule_does_not_pay_for_length():
    short = "Happy to help! Boil the water with vinegar and rinse it twice. Good luck!"
    long = short.replace("twice.", "twice. Then wait for an hour, wipe the rim and dry the base with a soft towel.")
    assert courtesy(["", ""], [short, long]) == [1.0, 1.0]


def test_the_rule_wants_one_answer_per_prompt():
    with pytest.raises(ValueError, match="1 prompts and 2 answers"):
        courtesy(["a"], ["b", "c"])
