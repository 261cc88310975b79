"""Chat templates, end tokens and filters. The tokenizer makes one token of each character and each special token."""

import pytest
from tokenizers.processors import TemplateProcessing

from rlhf.config import ConfigError
from rlhf.data.encode import Encoded, Encoder

PROMPT, ANSWER, CHOSEN, REJECTED = "prompt", "answer", "chosen", "rejected"


def encode(config, tokenizer, rows, answers=(ANSWER,)) -> tuple[list[Encoded], dict[str, int]]:
    return Encoder(config, tokenizer).encode([(f"rows:{i}", row) for i, row in enumerate(rows, 1)], PROMPT, answers)


def problem_of(config, tokenizer, rows, answers=(ANSWER,)) -> str:
    with pytest.raises(ConfigError) as caught:
        encode(config, tokenizer, rows, answers)
    (problem,) = caught.value.problems
    return problem


def decoded(tokenizer, encoded: Encoded) -> list[str]:
    return [tokenizer.decode(list(ids)) for ids in (encoded.prompt_ids, *encoded.answers)]


def test_prompt_and_answer_become_a_chat_turn(tokenizer, data_config):
    kept, dropped = encode(data_config(system=None), tokenizer, [{PROMPT: "Hi?", ANSWER: " Yo. "}])
    assert dropped == {} and kept[0].text == "Hi?"
    assert decoded(tokenizer, kept[0]) == ["<|user|>Hi?<|end|><|assistant|>", " Yo. <|end|>"]
    assert [len(ids) for ids in (kept[0].prompt_ids, *kept[0].answers)] == [6, 6]
    assert kept[0].answers[0][-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("system", "expected"), [(None, ""), ("", "<|system|><|end|>"), ("Be kind.", "<|system|>Be kind.<|end|>")]
)
def test_system_message(tokenizer, data_config, system, expected):
    kept, _ = encode(data_config(system=system), tokenizer, [{PROMPT: "Hi?"}], answers=())
    assert decoded(tokenizer, kept[0]) == [f"{expected}<|user|>Hi?<|end|><|assistant|>"]


def test_empty_system_message_suppresses_a_templates_own(tokenizer, data_config):
    own = "{% if messages[0]['role'] != 'system' %}{{ '<|system|>I am Bot.<|end|>' }}{% endif %}"
    tokenizer.chat_template = own + tokenizer.chat_template
    texts = {}
    for system in (None, ""):
        kept, _ = encode(data_config(system=system), tokenizer, [{PROMPT: "Hi?"}], answers=())
        (texts[system],) = decoded(tokenizer, kept[0])
    assert texts[None] == "<|system|>I am Bot.<|end|><|user|>Hi?<|end|><|assistant|>"
    assert texts[""] == "<|system|><|end|><|user|>Hi?<|end|><|assistant|>"


def test_prompts_and_answers_may_be_messages(tokenizer, data_config):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "Yo."},
        {"role": "user", "content": "How?"},
    ]
    answer = [*turns, {"role": "assistant", "content": "Well."}]
    kept, _ = encode(data_config(system="Be kind."), tokenizer, [{PROMPT: turns, ANSWER: answer}])
    # The row's own system message stays and the config's is not added to it.
    prompt = "<|system|>Be brief.<|end|><|user|>Hi?<|end|><|assistant|>Yo.<|end|><|user|>How?<|end|><|assistant|>"
    assert decoded(tokenizer, kept[0]) == [prompt, "Well.<|end|>"]
    assert kept[0].text == "system: Be brief.\nuser: Hi?\nassistant: Yo.\nuser: How?"
    kept, _ = encode(data_config(), tokenizer, [{PROMPT: turns[1:2], ANSWER: "Yo."}])
    assert kept[0].text == "Hi?"


def test_end_token_is_there_once_also_when_it_pads(tokenizer, data_config):
    tokenizer.pad_token = tokenizer.eos_token
    kept, _ = encode(data_config(), tokenizer, [{PROMPT: "Hi?", ANSWER: "Yo."}, {PROMPT: "Hi?", ANSWER: "Yo.<|end|>"}])
    assert [row.answers[0].count(tokenizer.eos_token_id) for row in kept] == [1, 1]
    assert kept[0].answers == kept[1].answers


def test_without_a_template_the_leading_special_tokens_are_kept(tokenizer, data_config):
    config = data_config(use_chat_template=False, system=None)
    kept, _ = encode(config, tokenizer, [{PROMPT: "Q:", ANSWER: " A"}])
    assert decoded(tokenizer, kept[0]) == ["Q:", " A<|end|>"]
    # As tokenizers that put a start token in front, and an end token behind, which must not end the prompt.
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<|user|>", "<|end|>")]
    template = TemplateProcessing(single="<|user|> $A <|end|>", pair=None, special_tokens=ids)
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer.decode(tokenizer("Q:")["input_ids"]) == "<|user|>Q:<|end|>"
    kept, _ = encode(config, tokenizer, [{PROMPT: "Q:", ANSWER: " A"}])
    assert decoded(tokenizer, kept[0]) == ["<|user|>Q:", " A<|end|>"]
    kept, _ = encode(data_config(system=None), tokenizer, [{PROMPT: "Q:", ANSWER: " A"}])
    assert decoded(tokenizer, kept[0]) == ["<|user|>Q:<|end|><|assistant|>", " A<|end|>"]


def test_demonstrations_are_filtered_by_reason(tokenizer, data_config):
    # Without a template, a prompt has as many tokens as characters, and an answer one more.
    config = data_config(use_chat_template=False, max_prompt_length=4, max_answer_length=5)
    rows = [
        {PROMPT: "1234", ANSWER: "1234"},
        {PROMPT: "12345", ANSWER: "1"},
        {PROMPT: "1", ANSWER: "12345"},
        {PROMPT: " \n", ANSWER: "1"},
        {PROMPT: None, ANSWER: "1"},
        {PROMPT: "", ANSWER: ""},
        {PROMPT: [], ANSWER: "1"},
        {PROMPT: [{"role": "user", "content": " "}], ANSWER: "1"},
        {PROMPT: "1", ANSWER: "\t"},
        {PROMPT: "1", ANSWER: None},
        {PROMPT: "1", ANSWER: []},
        {PROMPT: "9", ANSWER: "9"},
    ]
    kept, dropped = encode(config, tokenizer, rows)
    assert [row.text for row in kept] == ["1234", "9"]
    assert dropped == {"prompt_empty": 5, "answer_empty": 3, "prompt_too_long": 1, "answer_too_long": 1}
    assert sum(dropped.values()) + len(kept) == len(rows)


def test_preferences_are_filtered_by_reason(tokenizer, data_config):
    config = data_config(max_answer_length=5)
    rows = [
        {PROMPT: "p", CHOSEN: "good", REJECTED: "bad"},
        {PROMPT: "p", CHOSEN: "same", REJECTED: "same"},
        {PROMPT: "p", CHOSEN: "good", REJECTED: "worse"},
        {PROMPT: "p", CHOSEN: "better", REJECTED: "bad"},
        {PROMPT: "p", CHOSEN: "good", REJECTED: ""},
    ]
    kept, dropped = encode(config, tokenizer, rows, (CHOSEN, REJECTED))
    assert [decoded(tokenizer, row)[1:] for row in kept] == [["good<|end|>", "bad<|end|>"]]
    assert dropped == {"answers_equal": 1, "answer_too_long": 2, "answer_empty": 1}


def test_rows_keep_their_order_across_chunks(tokenizer, data_config, monkeypatch):
    rows = [{PROMPT: str(i) if i % 5 else "", ANSWER: str(-i)} for i in range(50)]
    whole = encode(data_config(), tokenizer, rows)
    monkeypatch.setattr("rlhf.data.encode.CHUNK", 7)
    assert encode(data_config(), tokenizer, rows) == whole
    assert [row.text for row in whole[0]] == [str(i) for i in range(50) if i % 5]
    assert whole[1] == {"prompt_empty": 10}


def test_tokenizer_that_does_not_fit_the_config(tokenizer, data_config):
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    with pytest.raises(ConfigError) as caught:
        Encoder(data_config(), tokenizer)
    ending, template = caught.value.problems
    assert "has no end token" in ending and "model.eos_token=" in ending
    assert "has no chat template" in template and "data.use_chat_template=false" in template
    tokenizer.eos_token = "<|end|>"
    problem = problem_of(data_config(use_chat_template=False, system="Be kind."), tokenizer, [])
    assert "data.system='Be kind.' needs a chat template" in problem


def test_messages_that_cannot_be_a_prompt_or_an_answer_are_named(tokenizer, data_config):
    user, assistant = ({"role": role, "content": "Hi."} for role in ("user", "assistant"))
    good = {PROMPT: "p", ANSWER: "a"}
    problem = problem_of(data_config(), tokenizer, [good, {PROMPT: [user, assistant], ANSWER: "a"}])
    assert problem.startswith("rows:2: column 'prompt' ends with the assistant's message")
    problem = problem_of(data_config(), tokenizer, [good, good, {PROMPT: "p", ANSWER: [assistant, user]}])
    assert problem.startswith("rows:3: column 'answer' ends with a message of 'user'")
    plain = data_config(use_chat_template=False)
    assert "which need data.use_chat_template=true" in problem_of(plain, tokenizer, [{PROMPT: [user], ANSWER: "a"}])


def test_template_that_refuses_a_system_message(tokenizer, data_config):
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    rows = [{PROMPT: "p", ANSWER: "a"}]
    problem = problem_of(data_config(system=""), tokenizer, rows)
    assert problem.startswith("rows:1: the chat template refuses these messages (no system role).")
    assert "data.system=null" in problem
    assert len(encode(data_config(system=None), tokenizer, rows)[0]) == 1
