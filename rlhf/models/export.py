"""Saving models as plain Hugging Face folders, also when their weights are spread over ranks.

Weights are gathered one tensor at a time to rank 0's host memory, so the device never holds more than one (A12).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn

from rlhf import distributed
from rlhf.models.heads import WrappedModel

Gathered = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]


def merged_tensors(model: nn.Module, gathered: Gathered) -> Iterator[tuple[str, Tensor]]:
    """(name in the plain model, whole tensor on the host) with LoRA merged in. Collective; tied tensors come once."""
    deltas: dict[str, Any] = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "lora_" in name or ".original_module." in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        plain = name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        layer = deltas.get(plain) if name.endswith(".base_layer.weight") else None
        involved = (
            [tensor] if layer is None else [tensor, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        )
        with gathered([p for p in involved if isinstance(p, nn.Parameter)]), torch.no_grad():
            whole = tensor if layer is None else tensor + layer.get_delta_weight("default").to(tensor.dtype)
            host = whole.detach().to("cpu", copy=True)
        yield plain, host


def save_model(wrapped: WrappedModel, gathered: Gathered, tokenizer, folder: Path) -> None:
    """Writes the whole model, adapters merged, as safetensors with config and tokenizer; loads with plain transformers.

    Collective: every rank takes part in gathering, rank 0 writes. Checks every shape that was written (A22).
    """
    model = wrapped.transformers_model
    tensors: dict[str, Tensor] = {}
    for name, tensor in merged_tensors(model, gathered):
        if distributed.rank() == 0:
            tensors[name] = tensor
    if distributed.rank() == 0:
        write_folder(model, tensors, tokenizer, folder)
    distributed.barrier()


def write_folder(model: Any, tensors: dict[str, Tensor], tokenizer, folder: Path) -> None:
    """Writes `tensors` under the architecture of `model`; on one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
    _check_shapes(tensors, folder)


def _check_shapes(tensors: dict[str, Tensor], folder: Path) -> None:
    written = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            written.update({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    wrong = [
        name for name, tensor in tensors.items() if written.get(name) != tuple(tensor.shape) or tensor.numel() == 0
    ]
    if wrong:
        raise RuntimeError(f"{len(wrong)} tensors in {folder} do not have the model's shape, first {wrong[0]}")


def save_adapter(wrapped: WrappedModel, gathered: Gathered, base: str, folder: Path) -> None:
    """Writes the LoRA adapter alone in peft's format, beside the name of its `base`. Collective like `save_model`."""
    from peft import get_peft_model_state_dict

    peft_model = wrapped.lm
    state = {}
    for name, tensor in peft_model.state_dict(keep_vars=True).items():
        if "lora_" in name or ".modules_to_save." in name:
            with gathered([tensor]):
                state[name] = tensor.detach().to("cpu", copy=True)
    if distributed.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        peft_config = peft_model.peft_config["default"]
        peft_config.base_model_name_or_path = base
        peft_config.inference_mode = True
        peft_config.save_pretrained(folder)
        peft_config.inference_mode = False
        adapter = get_peft_model_state_dict(peft_model, state_dict=state, save_embedding_layers=False)
        save_torch_state_dict(
            adapter, folder, filename_pattern="adapter_model{suffix}.safetensors", metadata={"format": "pt"}
        )
        _check_shapes(adapter, folder)
    distributed.barrier()


def save_reward_statistics(folder: Path, mean: float, std: float, count: float) -> None:
    """The reward's mean and deviation over the training set, for PPO's z-score (article C10)."""
    (folder / "reward_statistics.json").write_text(json.dumps({"mean": mean, "std": std, "count": count}) + "\n")
