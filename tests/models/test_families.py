"""The families' arithmetic against transformers and peft on the meta device, and every model and machine of conf/."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.config import ConfigError, HardwareConfig, ModelConfig, ModelShape
from rlhf.models.families import (
    config_arguments,
    known_linear_names,
    linears,
    lora_parameter_count,
    parameter_count,
    shape_of,
    shape_problems,
    target_modules,
)
from rlhf.models.family_table import FAMILIES

ROOT = Path(__file__).parents[2]
MODELS = sorted(path.stem for path in (ROOT / "conf/model").glob("*.yaml"))
MACHINES = sorted(path.stem for path in (ROOT / "conf/hardware").glob("*.yaml"))
IN_TRANSFORMERS = [family for family in FAMILIES if family != "glm_blank_infilling"]
FLAGS = ("gated_mlp", "tied_embeddings", "attention_bias", "mlp_bias")

# As published: the hub's counts of the safetensors files, and for the older ones the model cards.
PUBLISHED = {
    "bloom_560m": 559_214_592,
    "bloom_7b1": 7_069_016_064,
    "gemma_2b": 2_506_172_416,
    "glm4_9b": 9_399_951_360,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama2_7b": 6_738_415_616,
    "llama32_1b": 1_235_814_400,
    "llama3_70b": 70_553_706_496,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "opt_1b3": 1_315_758_080,
    "phi2": 2_779_683_840,
    "pythia_12b": 11_846_072_320,
    "pythia_1b4": 1_414_647_808,
    "pythia_6b9": 6_857_302_016,
    "qwen25_0b5": 494_032_768,
    "qwen25_14b": 14_770_033_664,
    "qwen25_1b5": 1_543_714_304,
    "qwen25_72b": 72_706_203_648,
    "qwen25_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "smollm2_135m": 134_515_008,
    "smollm2_1b7": 1_711_376_384,
    "tinyllama_1b1": 1_100_048_384,
}


def group(name: str) -> dict:
    """One file of conf/ as Hydra composes it, `name` being group/option."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose(name)[name.partition("/")[0]])  # pyright: ignore[reportReturnType]


def shape_in_conf(name: str) -> ModelShape:
    shape = ModelConfig(**group(f"model/{name}")).shape
    assert shape is not None
    return shape


def small_shape(family: str, **changes) -> ModelShape:
    """A shape whose sizes all differ, with whatever the family can vary away from its usual value."""
    row = FAMILIES[family]
    free_heads = row.name_of("kv_heads") is not None
    values: dict[str, Any] = {
        "family": family,
        "layers": 3,
        "hidden": 48,
        "intermediate": 192 if row.name_of("intermediate") is None else 80,
        "heads": 4,
        "kv_heads": 2 if free_heads else 4,
        "head_dim": 10 if row.name_of("head_dim") is not None else 12,
        "vocabulary": 101,
        "max_length": 64,
    }
    flags = {flag: bool(row.defaults.get(flag)) for flag in FLAGS}
    return ModelShape.model_validate(values | flags | changes)


def on_meta(shape: ModelShape, auto_class: Any = AutoModelForCausalLM, **arguments) -> torch.nn.Module:
    config = AutoConfig.for_model(shape.family, **config_arguments(shape), **arguments)
    with torch.device("meta"):
        return auto_class.from_config(config)


def size_of(model: torch.nn.Module, trainable_only: bool = False) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable_only)


def test_conf_has_its_models_and_machines():
    assert len(MODELS) >= 35
    assert len(MACHINES) >= 18
    assert set(PUBLISHED) < set(MODELS)
    assert {shape_in_conf(name).family for name in MODELS} >= set(FAMILIES) - {"glm4"}
    assert len(IN_TRANSFORMERS) == 12


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_conf(name):
    config = ModelConfig(**group(f"model/{name}"))
    assert config.name == name
    assert config.shape is not None
    sources = [config.path is not None, config.package is not None, config.random_init]
    assert sources.count(True) == 1
    count = parameter_count(config.shape)
    assert count.total == PUBLISHED.get(name, count.total)
    if config.shape.family == "glm_blank_infilling":
        return
    hf_config = AutoConfig.for_model(config.shape.family, **config_arguments(config.shape))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=config.attention)
    assert count.total == size_of(model)
    assert shape_of(json.loads(hf_config.to_json_string())) == config.shape


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_of_conf(name):
    hardware = HardwareConfig(**group(f"hardware/{name}"))
    assert hardware.name == name
    assert hardware.rendezvous is None
    assert hardware.timeout_minutes == 30
    assert (hardware.device == "cuda") == (hardware.device_memory_gib is not None) == (name not in ("auto", "cpu"))
    assert hardware.device != "cuda" or None not in (hardware.host_memory_gib, hardware.compute_capability)
    if "_x" in name:
        assert hardware.devices is not None
        assert hardware.devices * hardware.nodes == int(name.rpartition("_x")[2])


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_counts_of_a_small_model_and_its_reward_model(family):
    for tied in (False, True):
        shape = small_shape(family, tied_embeddings=tied)
        count = parameter_count(shape)
        assert count.total == size_of(on_meta(shape))
        reward_model = on_meta(shape, AutoModelForSequenceClassification, num_labels=1)
        assert count.backbone + shape.hidden == size_of(reward_model)
        assert count.total - parameter_count(shape.model_copy(update={"layers": 2})).total == count.block


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_a_bias_either_counts_or_is_refused(family, flag):
    usual = small_shape(family)
    other = usual.model_copy(update={flag: not getattr(usual, flag)})
    if FAMILIES[family].name_of(flag) is None:
        assert any(f"model.shape.{flag}" in problem for problem in shape_problems(other))
        with pytest.raises(ConfigError, match=flag):
            config_arguments(other)
    else:
        assert parameter_count(other).total == size_of(on_meta(other)) != parameter_count(usual).total


def test_the_first_glm_has_the_tensors_of_its_published_code():
    """191,168 elements: THUDM's own modelling code with 3 layers, hidden 64, 512 tokens, 64 positions."""
    shape = small_shape("glm_blank_infilling", hidden=64, intermediate=256, head_dim=16, vocabulary=512)
    assert parameter_count(shape).total == 191_168
    assert parameter_count(shape).positions == 2 * 65 * 64
    sizes = {linear.layer.path: (linear.outputs, linear.inputs) for linear in linears(shape)}
    assert sizes == {
        "attention.query_key_value": (192, 64),
        "attention.dense": (64, 64),
        "mlp.dense_h_to_4h": (256, 64),
        "mlp.dense_4h_to_h": (64, 256),
    }
    # the GPT-NeoX block has the same adapters
    twin = small_shape("gpt_neox", hidden=64, intermediate=256, head_dim=16, vocabulary=512)
    for targets in ("qkv", "all"):
        assert lora_parameter_count(shape, 8, targets) == lora_parameter_count(twin, 8, targets)


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
@pytest.mark.parametrize("targets", ["qkv", "all", "first"])
def test_lora_counts_what_peft_adds(family, targets):
    shape = small_shape(family)
    chosen = known_linear_names(family)[:1] if targets == "first" else targets
    model = on_meta(shape)
    is_linear = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    in_blocks = {name for name in is_linear if ".0." in name}
    assert {linear.layer.path for linear in linears(shape)} == {name.partition(".0.")[2] for name in in_blocks}
    peft_config = LoraConfig(
        r=5, target_modules=target_modules(family, chosen), task_type="CAUSAL_LM", fan_in_fan_out=family == "gpt2"
    )
    adapted = get_peft_model(model, peft_config)  # pyright: ignore[reportArgumentType]
    assert lora_parameter_count(shape, 5, chosen) == size_of(adapted, trainable_only=True) > 0


def test_targets():
    assert target_modules("llama", "qkv") == ["q_proj", "k_proj", "v_proj"]
    assert target_modules("gpt2", "qkv") == ["c_attn"]
    assert target_modules("glm_blank_infilling", "qkv") == ["query_key_value"]
    assert target_modules("gpt2", "all") == ["c_attn", "c_proj", "c_fc"]
    assert target_modules("gpt2", ["attn.c_proj"]) == ["attn.c_proj"]
    assert target_modules("mamba", ["in_proj"]) == ["in_proj"]
    shape = small_shape("gpt2")
    both = lora_parameter_count(shape, 4, ["c_proj"])
    assert both == lora_parameter_count(shape, 4, ["attn.c_proj"]) + lora_parameter_count(shape, 4, ["mlp.c_proj"])


@pytest.mark.parametrize(
    ("family", "targets", "named"),
    [
        ("gpt2", ["q_proj", "c_fc"], ["q_proj", "c_attn", "c_proj"]),
        ("llama", "proj", ["q_proj", "down_proj"]),  # peft matches whole names, not their ends
        ("mamba", "qkv", ["mamba", "list of module names", "llama"]),
    ],
)
def test_targets_that_match_nothing_are_refused_with_the_names_there_are(family, targets, named):
    with pytest.raises(ConfigError) as error:
        target_modules(family, targets)
    assert all(name in str(error.value) for name in named)


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_shape_of_what_transformers_saves(family, tmp_path):
    usual = AutoConfig.for_model(family)
    usual.save_pretrained(tmp_path)
    shape = shape_of(json.loads((tmp_path / "config.json").read_text()))
    assert shape_problems(shape) == []
    with torch.device("meta"):
        assert parameter_count(shape).total == size_of(AutoModelForCausalLM.from_config(usual))
    activation = FAMILIES[family].name_of("activation")
    assert activation is None or getattr(usual, activation) == FAMILIES[family].activation


def test_shape_of_older_files():
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024}
    assert shape_of(gpt2 | {"vocab_size": 50257}) == shape_in_conf("gpt2")
    bloom = {"model_type": "bloom", "n_embed": 4096, "num_attention_heads": 32, "n_layer": 30, "vocab_size": 250880}
    assert shape_of(bloom) == shape_in_conf("bloom_7b1")
    glm = {"model_type": "glm", "num_layers": 48, "hidden_size": 4096, "num_attention_heads": 64, "vocab_size": 50304}
    assert shape_of(glm | {"max_sequence_length": 1024, "block_position_encoding": True}) == shape_in_conf("glm_10b")


@pytest.mark.parametrize(
    ("config_json", "named"),
    [
        ({"model_type": "mamba"}, ["'mamba'", "llama", "glm_blank_infilling"]),
        ({}, ["None", "llama"]),
        ({"model_type": "llama", "hidden_size": 64}, ["num_hidden_layers", "llama"]),
        ({"model_type": "opt", "do_layer_norm_before": False}, ["do_layer_norm_before", "opt"]),
    ],
)
def test_shape_of_says_what_it_cannot_read(config_json, named):
    with pytest.raises(ConfigError) as error:
        shape_of(config_json)
    assert all(name in str(error.value) for name in named)


def test_shape_of_refuses_senseless_sizes():
    config_json = AutoConfig.for_model("llama").to_dict() | {"num_hidden_layers": 0, "vocab_size": "many"}
    with pytest.raises(ConfigError) as error:
        shape_of(config_json)
    assert len(error.value.problems) == 2


def test_a_shape_that_the_family_cannot_have_is_refused_field_by_field():
    shape = small_shape("gpt2", kv_heads=3, head_dim=7, gated_mlp=True)
    problems = shape_problems(shape)
    assert len(problems) == 4  # the three, and 4 heads that 3 does not divide
    assert "model.shape.kv_heads is 3" in problems[0]
    assert "write 4" in problems[0]
    assert "multiple of 5" in shape_problems(small_shape("gpt2", heads=5, kv_heads=5, head_dim=9))[0]
    with pytest.raises(ConfigError, match="unheard"):
        shape_problems(shape.model_copy(update={"family": "unheard"}))


def test_planning_needs_no_torch():
    code = "import sys, rlhf.models.families; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
