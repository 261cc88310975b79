"""From text to tokens, once: chat template, end token, and the filters that keep what fits (A40)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from jinja2 import TemplateError

from rlhf.config import ConfigError, DataConfig
from rlhf.data.sources import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]
Messages = list[dict[str, str]]

# Rows that are tokenised together: enough to keep the tokenizer's threads busy.
CHUNK = 1024


class Encoded(NamedTuple):
    text: str
    prompt_ids: Ids
    answers: tuple[Ids, ...]


class Encoder:
    """Raises ConfigError when the tokenizer lacks an end token, or the template that the config asks for."""

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase):
        problems = []
        if tokenizer.eos_token_id is None:
            problems.append(
                "The tokenizer has no end token, so answers could not end. Write model.eos_token=<one of its tokens>."
            )
        if config.use_chat_template and not tokenizer.chat_template:
            problems.append(
                "data.use_chat_template=true, but the tokenizer has no chat template. "
                "Give one (model.chat_template=...) or write data.use_chat_template=false."
            )
        if config.system and not config.use_chat_template:
            problems.append(
                f"data.system={config.system!r} needs a chat template, and data.use_chat_template=false. "
                "Write data.system=null, or put the text into the prompts."
            )
        if problems:
            raise ConfigError(problems)
        self.config, self.tokenizer = config, tokenizer
        self.leading_ids = _leading_special_ids(tokenizer)

    def encode(
        self, rows: Sequence[Row], prompt_column: str, answer_columns: Sequence[str]
    ) -> tuple[list[Encoded], dict[str, int]]:
        """The rows that are kept, in order, and how many were dropped for which reason."""
        dropped: Counter[str] = Counter()
        kept: list[Encoded] = []
        for start in range(0, len(rows), CHUNK):
            for encoded in self._encode_chunk(rows[start : start + CHUNK], prompt_column, answer_columns, dropped):
                reason = self._too_long_or_equal(encoded)
                if reason:
                    dropped[reason] += 1
                else:
                    kept.append(encoded)
        return kept, dict(sorted(dropped.items()))

    def _encode_chunk(
        self, rows: Sequence[Row], prompt_column: str, answer_columns: Sequence[str], dropped: Counter[str]
    ) -> Iterator[Encoded]:
        prompts: list[Messages | str] = []
        rendered: list[str] = []
        answers: list[list[str]] = [[] for _ in answer_columns]
        for place, values in rows:
            prompt = values[prompt_column]
            texts = [_answer_text(values[column], column, place) for column in answer_columns]
            if _is_empty(prompt):
                dropped["prompt_empty"] += 1
            elif any(not text.strip() for text in texts):
                dropped["answer_empty"] += 1
            else:
                prompts.append(prompt)
                rendered.append(self._render(prompt, prompt_column, place))
                for column, text in zip(answers, texts, strict=True):
                    column.append(text)
        prompt_ids = self._prompt_ids(rendered)
        answer_ids = (
            zip(*(self._answer_ids(column) for column in answers), strict=True) if answers else [()] * len(prompts)
        )
        for prompt, ids, ends in zip(prompts, prompt_ids, answer_ids, strict=True):
            yield Encoded(_readable(prompt), ids, tuple(ends))

    def _too_long_or_equal(self, encoded: Encoded) -> str | None:
        if len(encoded.prompt_ids) > self.config.max_prompt_length:
            return "prompt_too_long"
        if any(len(ids) > self.config.max_answer_length for ids in encoded.answers):
            return "answer_too_long"
        if len(set(encoded.answers)) < len(encoded.answers):
            return "answers_equal"
        return None

    def _render(self, prompt: Messages | str, column: str, place: str) -> str:
        if not self.config.use_chat_template:
            if isinstance(prompt, str):
                return prompt
            raise ConfigError([f"{place}: column {column!r} holds messages, which need data.use_chat_template=true."])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[-1]["role"] == "assistant":
            raise ConfigError(
                [f"{place}: column {column!r} ends with the assistant's message; a prompt ends with the user's."]
            )
        # A row's own system message is the better informed one, and templates refuse two.
        if self.config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system}, *messages]
        try:
            return cast(str, self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            advice = " data.system=null leaves the system message out." if self.config.system is not None else ""
            raise ConfigError([f"{place}: the chat template refuses these messages ({error}).{advice}"]) from error

    def _prompt_ids(self, rendered: list[str]) -> list[Ids]:
        """A template writes its special tokens itself; plain text gets those that the tokenizer puts in front."""
        leading = () if self.config.use_chat_template else self.leading_ids
        return [(*leading, *ids) for ids in self._tokenise(rendered)]

    def _answer_ids(self, texts: list[str]) -> list[Ids]:
        end = cast(int, self.tokenizer.eos_token_id)  # __init__ has seen to that
        return [ids if ids[-1:] == (end,) else (*ids, end) for ids in self._tokenise(texts)]

    def _tokenise(self, texts: list[str]) -> list[Ids]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [tuple(ids) for ids in encoded["input_ids"]]


def _leading_special_ids(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The tokens in front of plain text, such as Llama's start token; not those that some tokenizers put behind it."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    return tuple(encoded["input_ids"][: encoded["special_tokens_mask"].index(0)])


def _is_empty(prompt: Messages | str | None) -> bool:
    text = prompt[-1]["content"] if prompt and isinstance(prompt, list) else prompt
    return not (isinstance(text, str) and text.strip())


def _answer_text(value: Messages | str | None, column: str, place: str) -> str:
    """An answer may be a conversation that ends with it, as in many preference data sets."""
    if not isinstance(value, list):
        return value or ""
    if value and value[-1]["role"] != "assistant":
        raise ConfigError(
            [f"{place}: column {column!r} ends with a message of {value[-1]['role']!r}; it must be the assistant's."]
        )
    return value[-1]["content"] if value else ""


def _readable(prompt: Messages | str) -> str:
    """A prompt as a person (or a reward function) reads it, without the template's tokens."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
