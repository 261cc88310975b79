"""The two shapes in which stages see a model: log-probs of chosen tokens, or one score per token.

Both wrap a transformers model so that everything a stage needs happens inside one `forward`: wrappers that gather weights
around a module's forward (ZeRO-3, Gemini) then work without the stages knowing. A family that needs more
than a mask to place its tokens overrides `_hidden` only.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhf.losses import token_log_probs


def positions_from_mask(attention_mask: Tensor) -> Tensor:
    """0, 1, 2 ... over the real tokens of each row, whatever the padding (A35). (batch, length) -> (batch, length)."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def packed_positions_and_mask(segment_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions that restart per document, and the additive (batch, 1, length, length) mask that keeps documents apart."""
    length = segment_ids.shape[1]
    index = torch.arange(length, device=segment_ids.device)
    first = functional.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    start = torch.where(first, index, 0).cummax(dim=1).values
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    allowed = same & (index[:, None] >= index[None, :])
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segment_ids.device)
    mask.masked_fill_(~allowed, torch.finfo(dtype).min)
    return index - start, mask[:, None]


class Fp32Head(nn.Linear):
    """A scalar head that computes in fp32 whatever the model's precision (A28)."""

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias.float() if self.bias is not None else None
        return functional.linear(input.float(), self.weight.float(), bias)


class _Wrapped(nn.Module):
    """`lm` is a transformers model, or a peft model around one."""

    def __init__(self, lm: nn.Module):
        super().__init__()
        self.lm = lm
        self._takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters

    @property
    def transformers_model(self) -> nn.Module:
        return self.lm.get_base_model() if hasattr(self.lm, "peft_config") else self.lm

    @property
    def backbone(self) -> nn.Module:
        model = self.transformers_model
        return getattr(model, model.base_model_prefix)

    @property
    def has_adapters(self) -> bool:
        return hasattr(self.lm, "peft_config")

    def without_adapters(self) -> AbstractContextManager:
        """The base model: with LoRA, the reference is the actor with its adapters off (A26)."""
        return self.lm.disable_adapter() if self.has_adapters else nullcontext()

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None, **cache) -> Tensor:
        """Last hidden state (batch, length, hidden)."""
        kwargs: dict = {"attention_mask": attention_mask, "use_cache": False, **cache}
        if segment_ids is not None:
            dtype = next(self.backbone.parameters()).dtype
            kwargs["position_ids"], kwargs["attention_mask"] = packed_positions_and_mask(segment_ids, dtype)
        elif self._takes_positions and "position_ids" not in kwargs:
            kwargs["position_ids"] = positions_from_mask(attention_mask)
        return self.backbone(input_ids=input_ids, **kwargs).last_hidden_state


class PolicyModel(_Wrapped):
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
        """Log-prob in fp32, and entropy if asked for, of the tokens in columns `answer_start`..: (batch, length - answer_start).

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


class ScalarModel(_Wrapped):
    """A sequence classifier with one label, read at every token: the reward model and the critic."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Scores in fp32, (batch, length)."""
        return self.transformers_model.score(self._hidden(input_ids, attention_mask)).squeeze(-1)


def score_at_last_token(scores: Tensor, attention_mask: Tensor) -> Tensor:
    """The score at each row's last real token, by the mask and never by the pad id (A37). (batch, length) -> (batch,)."""
    length = attention_mask.shape[1]
    last = (torch.arange(length, device=scores.device) * attention_mask).argmax(dim=1, keepdim=True)
    return scores.gather(1, last).squeeze(1)
