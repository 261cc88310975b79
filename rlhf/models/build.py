"""Tokenizers and models, built from a `ModelConfig` through transformers and peft."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging as transformers_logging

from rlhf.config import Config, ConfigError, LoraConfig, ModelConfig
from rlhf.models import families
from rlhf.models.export import merged_tensors, write_folder
from rlhf.models.heads import Fp32Head, PolicyModel, ScalarModel
from rlhf.models.tiny_tokenizer import build_tiny_tokenizer

# Its loading reports and bars are for people who load one model by hand; missing keys are checked here.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Attributes by which transformers' configs name dropout. RLHF runs without it: it would make the policy ratio noisy.
_DROPOUT = ("dropout", "pdrop")


def local_source(config: ModelConfig, cache: Path, is_builder: bool, barrier: Callable[[], None]) -> str:
    """Where transformers can load the model from: a hub name or a folder.

    A GGUF file is converted to safetensors once, into `cache`, by the rank that builds: reading it takes 20 s a time,
    and neither ZeRO-3's partitioned loading nor the sequence classifiers can read it.
    """
    source = config.path
    if config.package is not None:
        spec = importlib.util.find_spec(config.package)
        if spec is None or spec.origin is None:
            raise ConfigError(
                [f"model={config.name} needs the Python package {config.package}: pip install {config.package}"]
            )
        source = str(Path(spec.origin).parent)
    assert source is not None
    if config.gguf_file is None:
        return source
    file = Path(source) / config.gguf_file
    if not file.is_file():
        raise ConfigError(
            [f"model.gguf_file={config.gguf_file} is not in {source}; write the name of a file in that folder"]
        )
    folder = cache / "models" / f"{config.name}-{file.stat().st_size}"
    if is_builder and not (folder / "whole").is_file():
        _convert_gguf(source, config.gguf_file, folder)
    barrier()
    return str(folder)


def _convert_gguf(source: str, gguf_file: str, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    del model.config.quantization_config  # the weights are plain from here on
    tensors = dict(merged_tensors(model, lambda parameters: nullcontext()))
    write_folder(model, tensors, AutoTokenizer.from_pretrained(source, gguf_file=gguf_file), folder)
    (folder / "whole").touch()  # last, so that an interrupted conversion is done again


def load_tokenizer(config: ModelConfig, source: str | None):
    """A tokenizer whose end token is the one that ends a turn, with a pad token (A38); masks never look at the pad
    id."""
    if source is None and config.tokenizer is None:
        assert config.shape is not None  # random weights have one
        tokenizer = build_tiny_tokenizer(config.shape.vocabulary)
    else:
        name = config.tokenizer or source
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                [f"no tokenizer could be loaded from {name}: {str(error).splitlines()[0]}; set model.tokenizer"]
            ) from error
    problems = []
    for role in ("eos_token", "pad_token"):
        token = getattr(config, role)
        if token is not None and token not in tokenizer.get_vocab():
            problems.append(f"model.{role}={token!r} is not in the vocabulary of {config.name}; write a token that is")
        elif token is not None:
            setattr(tokenizer, role, token)
    if problems:
        raise ConfigError(problems)
    if tokenizer.eos_token_id is None:
        raise ConfigError([f"the tokenizer of {config.name} has no end token; set model.eos_token"])
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def _without_dropout(hf_config) -> None:
    for name, value in vars(hf_config).items():
        if isinstance(value, float) and any(part in name for part in _DROPOUT):
            setattr(hf_config, name, 0.0)


def _hf_config(config: ModelConfig, source: str | None, tokenizer):
    if config.random_init:
        assert config.shape is not None
        hf_config = AutoConfig.for_model(config.shape.family, **families.config_arguments(config.shape))
    else:
        assert source is not None
        hf_config = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
    if getattr(hf_config, "final_logit_softcapping", None) or getattr(hf_config, "logit_scale", 1.0) not in (None, 1.0):
        raise ConfigError(
            [
                f"model={config.name} rescales its logits after the head, which the chunked log-probs do not do; "
                "choose another model"
            ]
        )
    _without_dropout(hf_config)
    hf_config._attn_implementation = config.attention
    hf_config.pad_token_id = tokenizer.pad_token_id
    hf_config.eos_token_id = tokenizer.eos_token_id
    hf_config.bos_token_id = tokenizer.bos_token_id
    return hf_config


@contextmanager
def _seeded(seed: int):
    """Random weights depend on the seed alone: the same on every rank, whatever ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _build(
    auto_class, config: Config, source: str | None, hf_config, seed: int, device: torch.device
) -> tuple[Any, dict]:
    dtype = DTYPES[config.precision.dtype]
    with _seeded(seed):
        if config.model.random_init:
            model, info = _with_random_weights(auto_class, hf_config, dtype, device), {}
        else:
            # straight to the GPU, so that N ranks do not hold N copies in host memory (A03)
            straight = device.type == "cuda" and not is_deepspeed_zero3_enabled()
            model, info = auto_class.from_pretrained(
                source,
                config=hf_config,
                device_map={"": device} if straight else None,
                dtype=dtype,
                output_loading_info=True,
                trust_remote_code=config.model.trust_remote_code,
                use_safetensors=True,
            )
    if is_deepspeed_zero3_enabled():
        _restore_frequencies(model)
    return model, info


def _with_random_weights(auto_class, hf_config, dtype: torch.dtype, device: torch.device) -> Any:
    """The same weights with and without ZeRO-3, which partitions them as they are made."""
    with torch.device(device):
        if is_deepspeed_zero3_enabled():
            return auto_class.from_config(hf_config, dtype=dtype)
        with no_init_weights():  # as ZeRO-3 does: torch's own initialisation would draw random numbers first
            model = auto_class.from_config(hf_config, dtype=dtype)
        model.init_weights()
        return model


def _restore_frequencies(model: Any) -> None:
    """Rotary frequencies in fp32 again: ZeRO-3's way of building rounds them to 16 bits, which turns far positions."""
    for module in model.modules():
        if hasattr(module, "original_inv_freq"):
            module.inv_freq, module.original_inv_freq = module.inv_freq.float(), module.original_inv_freq.float()
            model._init_weights(module)


def build_policy(config: Config, source: str | None, tokenizer, device: torch.device, adapters: bool) -> PolicyModel:
    """The causal LM of `config.model`, with LoRA adapters if asked for and configured."""
    hf_config = _hf_config(config.model, source, tokenizer)
    model, info = _build(AutoModelForCausalLM, config, source, hf_config, config.seed, device)
    _require_keys(config.model.name, info.get("missing_keys", ()))
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = _add_adapters(model, config, "CAUSAL_LM") if adapters and config.lora.enabled else model
    return PolicyModel(model)


def build_scalar(
    config: Config, source: str | None, tokenizer, device: torch.device, adapters: bool, trained_head: bool
) -> ScalarModel:
    """A one-label sequence classifier from `source`. `trained_head`: its head must be among the weights (A48)."""
    hf_config = _hf_config(config.model, source, tokenizer)
    hf_config.num_labels = 1
    model, info = _build(AutoModelForSequenceClassification, config, source, hf_config, config.seed + 1, device)
    missing = [key for key in info.get("missing_keys", ()) if not key.startswith("score.")]
    _require_keys(config.model.name, missing)
    if trained_head and "score.weight" in info.get("missing_keys", ()):
        raise ConfigError(
            [f"{source} holds no trained score head (score.weight); give the model folder of a stage=rm run"]
        )
    model.score.__class__ = Fp32Head
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = _add_adapters(model, config, "SEQ_CLS") if adapters and config.lora.enabled else model
    return ScalarModel(model)


def _require_keys(name: str, missing) -> None:
    if missing:
        raise ConfigError(
            [f"the weights of {name} lack {len(missing)} tensors, first {sorted(missing)[0]}; is it the right folder?"]
        )


def _add_adapters(model: Any, config: Config, task: str) -> nn.Module:
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    lora: LoraConfig = config.lora
    names = families.target_modules(model.config.model_type, lora.targets)
    linear = [name for name, module in model.named_modules() if "." in name and hasattr(module, "weight")]
    unmatched = [name for name in names if not any(f".{full}".endswith(f".{name}") for full in linear)]
    if unmatched:
        there = ", ".join(sorted({full.rsplit(".", 1)[-1] for full in linear}))
        raise ConfigError([f"lora.targets={unmatched} match no module of {config.model.name}; there are {there}"])
    peft_config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.scaling_alpha,  # pyright: ignore[reportArgumentType]  # peft only multiplies with it
        lora_dropout=lora.dropout,
        target_modules=list(names),
        task_type=task,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )
    with _seeded(config.seed + 2):
        # adapters in the model's precision: peft would keep them in fp32, and ZeRO-3 takes tensors of one kind only
        return get_peft_model(model, peft_config, autocast_adapter_dtype=False)


def read_reward_statistics(folder: str | None) -> dict[str, float] | None:
    """Mean and deviation of the reward that stage=rm saved beside its model (article C10), or None."""
    file = Path(folder or "") / "reward_statistics.json"
    return json.loads(file.read_text()) if folder and file.is_file() else None
