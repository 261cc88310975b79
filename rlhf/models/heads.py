"""The two shapes in which stages see a model: log-probs of chosen tokens, or one score per token.

Both wrap a transformers model so that everything a stage needs happens inside one `forward`: wrappers that gather
weights around a module's forward (ZeRO-3, Gemini) then work without the stages knowing. A family that needs more
than a mask to place its tokens overrides `_hidden` only.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.losses import token_log_probs


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """0, 1, 2 ... over the real tokens of each row, whatever the padding (A35). (batch, length) -> (batch, length)."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def visible(attention_mask: Tensor, keys: int | None = None) -> Tensor:
    """Which key each query may see, bool (batch, 1, length, keys): the real tokens up to it, and itself.

    Itself even where it is padding: with a query that sees nothing at all, cuDNN's attention gives NaN gradients (seen
    on an H200 in bf16 with left padding and lengths that are multiples of 64, torch 2.11).
    """
    length = attention_mask.shape[1]
    query = torch.arange(length, device=attention_mask.device)[:, None]
    key = torch.arange(keys or length, device=attention_mask.device)[None, :]
    real = functional.pad(attention_mask.bool(), (0, (keys or length) - length))[:, None, None, :]
    return (key <= query) & (real | (key == query))


def packed_positions_and_visible(segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions that restart per document, (batch, length), and `visible` that keeps documents apart."""
    length = segment_ids.shape[1]
    index = torch.arange(length, device=segment_ids.device)
    first = functional.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    start = torch.where(first, index, 0).cummax(dim=1).values
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return index - start, (same & (index[:, None] >= index[None, :]))[:, None]


class Fp32Head(nn.Linear):
    """A scalar head that computes in fp32 whatever the model's precision (A28)."""

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias.float() if self.bias is not None else None
        return functional.linear(input.float(), self.weight.float(), bias)


class WrappedModel(nn.Module):
    """`lm` is a transformers model, or a peft model around one."""

    lm: Any  # transformers and peft attach what is used here without types

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self.takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters

    @property
    def transformers_model(self) -> Any:
        return self.lm.get_base_model() if hasattr(self.lm, "peft_config") else self.lm

    @property
    def backbone(self) -> Any:
        model = self.transformers_model
        return getattr(model, model.base_model_prefix)

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.lm, "peft_config")

    def without_adapters(self) -> AbstractContextManager:
        """The base model: with LoRA, the reference is the actor with its adapters off (A26)."""
        return self.lm.disable_adapter() if self.has_adapters else nullcontext()

    def takes_visible(self, length: int) -> bool:
        """Whether the model takes a prepared `visible` mask: not where it places tokens by the 2D mask (ALiBi), in
        flash attention, or where a sliding window narrows what a query of this length sees."""
        config = self.transformers_model.config
        window = getattr(config, "sliding_window", None)
        kernel = config._attn_implementation in ("sdpa", "eager")
        return self.takes_positions and kernel and (window is None or length <= window)

    def as_attention_mask(self, seen: Tensor) -> Tensor:
        """`seen` as the model's attention kernel wants it."""
        if self.transformers_model.config._attn_implementation == "sdpa":
            return seen
        dtype = next(self.backbone.parameters()).dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None, **cache) -> Tensor:
        """Last hidden state (batch, length, hidden)."""
        kwargs: dict = {"attention_mask": attention_mask, "use_cache": False, **cache}
        if segment_ids is not None:
            kwargs["position_ids"], seen = packed_positions_and_visible(segment_ids)
            kwargs["attention_mask"] = self.as_attention_mask(seen)
        elif not cache and self.takes_positions:
            kwargs["position_ids"] = positions_from_mask(attention_mask)
            if self.takes_visible(input_ids.shape[1]) and not attention_mask.all():
                kwargs["attention_mask"] = self.as_attention_mask(visible(attention_mask))
        return self.backbone(input_ids=input_ids, **kwargs).last_hidden_state


class PolicyModel(WrappedModel):
    """A causal LM that answers with the log-probs of the tokens it is shown."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        answer_start: int = 1,
        temperature: float = 1.0,
        with_entropy: bool = False,
        segment_ids: Tensor | None = None,
        **cache,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-prob in fp32, and entropy if asked for, of the tokens in columns `answer_start`..: (batch, length -
        answer_start).

        With `past_key_values` the result is instead the logits of the next token, (batch, vocabulary), and None.
        """
        hidden = self._hidden(input_ids, attention_mask, segment_ids, **cache)
        head = self.transformers_model.get_output_embeddings()
        if cache:
            return functional.linear(hidden[:, -1], head.weight, head.bias), None
        return token_log_probs(
            hidden[:, answer_start - 1 : -1],
            head.weight,
            head.bias,
            input_ids[:, answer_start:],
            temperature=temperature,
            with_entropy=with_entropy,
        )


class ScalarModel(WrappedModel):
    """A sequence classifier with one label, read at every token: the reward model and the critic."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores in fp32, (batch, length)."""
        return self.transformers_model.score(self._hidden(input_ids, attention_mask)).squeeze(-1)


def score_at_last_token(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """The score at each row's last real token, by the mask and never by the pad id (A37). (batch, length) ->
    (batch,)."""
    length = attention_mask.shape[1]
    last = (torch.arange(length, device=scores.device) * attention_mask).argmax(dim=1, keepdim=True)
    return scores.gather(1, last).squeeze(1)
