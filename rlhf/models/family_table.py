"""The model families: one row of data each, no torch. `families.py` answers questions about them.

One row of `FAMILIES` per transformers model_type, and `glm_blank_infilling` for the first GLM (arXiv 2103.10360). A row
is data: the linear layers of a block, the norms, how config.json calls the fields of `ModelShape`, and what a field
must be where config.json cannot say it.

LoRA's "qkv" means the layers that make queries, keys and values. Families that fuse them (gpt2: `c_attn`; gpt_neox,
bloom, glm_blank_infilling: `query_key_value`) have one such layer, so one pair of low-rank matrices serves all three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf.config import ConfigError


@dataclass(frozen=True)
class Layer:
    """A linear layer of a block. `inputs`, `outputs` name widths (`families.linears`), `bias` a flag of ModelShape."""

    path: str  # inside a block
    inputs: str
    outputs: str
    bias: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_qkv(self) -> bool:
        return self.outputs in ("queries", "keys", "queries_keys_values")

    @property
    def in_mlp(self) -> bool:
        return "intermediate" in (self.inputs, self.outputs) or self.outputs == "two_intermediates"


@dataclass(frozen=True)
class Family:
    layers: tuple[Layer, ...]
    activation: str
    norm_vectors: int  # per norm, each `hidden` wide: 1 (RMSNorm) or 2 (LayerNorm)
    norms_per_block: int = 2
    outer_norms: int = 1  # after the last block; BLOOM has one more after the embedding
    norms_queries_and_keys: bool = False  # two RMSNorms per block, `head_dim` wide
    position_tables: int = 0  # learned positions, each `hidden` wide
    extra_positions: int = 0  # rows of such a table beyond max_length
    head_bias: bool = False
    # Field of ModelShape -> name in config.json, where it is not the usual one. None: config.json cannot say it, so it
    # has the value that `families.py` derives.
    names: Mapping[str, str | None] = field(default_factory=dict)
    # Fields of ModelShape when config.json is silent (flags not listed are false).
    defaults: Mapping[str, int] = field(default_factory=dict)
    # What config.json must not contradict: with another value the layers are not the ones listed here.
    requires: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, shape_field: str) -> str | None:
        return self.names.get(shape_field, USUAL_NAMES[shape_field])


USUAL_NAMES: Mapping[str, str | None] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
    "gated_mlp": None,
    "tied_embeddings": "tie_word_embeddings",
    "attention_bias": "attention_bias",
    "mlp_bias": None,
    "activation": "hidden_act",
}
OLDER_NAMES = {"hidden": "n_embed"}  # BLOOM


def _separate(output: Layer) -> tuple[Layer, ...]:
    return (
        Layer("self_attn.q_proj", "hidden", "queries", "attention_bias"),
        Layer("self_attn.k_proj", "hidden", "keys", "attention_bias"),
        Layer("self_attn.v_proj", "hidden", "keys", "attention_bias"),
        output,
    )


def _fused(qkv: str, output: str) -> tuple[Layer, ...]:
    return (
        Layer(qkv, "hidden", "queries_keys_values", "attention_bias"),
        Layer(output, "queries", "hidden", "attention_bias"),
    )


def _plain_mlp(up: str, down: str) -> tuple[Layer, ...]:
    return Layer(up, "hidden", "intermediate", "mlp_bias"), Layer(down, "intermediate", "hidden", "mlp_bias")


_OUTPUT = Layer("self_attn.o_proj", "queries", "hidden", "attention_bias")
_OUTPUT_WITHOUT_BIAS = Layer("self_attn.o_proj", "queries", "hidden")
_GATED_MLP = (Layer("mlp.gate_proj", "hidden", "intermediate", "mlp_bias"), *_plain_mlp("mlp.up_proj", "mlp.down_proj"))
_FUSED_GATED_MLP = (
    Layer("mlp.gate_up_proj", "hidden", "two_intermediates"),
    Layer("mlp.down_proj", "intermediate", "hidden"),
)
_NEOX_MLP = _plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_LLAMA = (*_separate(_OUTPUT), *_GATED_MLP)
_QWEN2 = (*_separate(_OUTPUT_WITHOUT_BIAS), *_GATED_MLP)
_GLM = (*_separate(_OUTPUT_WITHOUT_BIAS), *_FUSED_GATED_MLP)
_GPT2 = (*_fused("attn.c_attn", "attn.c_proj"), *_plain_mlp("mlp.c_fc", "mlp.c_proj"))
_NEOX = (*_fused("attention.query_key_value", "attention.dense"), *_NEOX_MLP)
_BLOOM = (*_fused("self_attention.query_key_value", "self_attention.dense"), *_NEOX_MLP)
_OPT = (*_separate(Layer("self_attn.out_proj", "queries", "hidden", "attention_bias")), *_plain_mlp("fc1", "fc2"))
_PHI = (*_separate(Layer("self_attn.dense", "queries", "hidden", "attention_bias")), *_plain_mlp("mlp.fc1", "mlp.fc2"))

_PLAIN_HEADS: Mapping[str, str | None] = {"kv_heads": None, "head_dim": None}
_ALWAYS_BIASED = {"attention_bias": True, "mlp_bias": True}
_GATED = {"gated_mlp": True}
_GPT2_NAMES = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "intermediate": "n_inner",
    "heads": "n_head",
    "max_length": "n_positions",
    "activation": "activation_function",
}
_OPT_REQUIRES = {  # opt-350m norms after the block and projects its embedding
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}

# Sources: transformers' modelling files; for glm_blank_infilling the published code of THUDM/glm-10b.
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        _GPT2,
        "gelu_new",
        norm_vectors=2,
        position_tables=1,
        names=_PLAIN_HEADS | _GPT2_NAMES | {"attention_bias": None},
        defaults=_ALWAYS_BIASED | {"tied_embeddings": True},
        requires={"add_cross_attention": False},
    ),
    "opt": Family(
        _OPT,
        "relu",
        norm_vectors=2,
        position_tables=1,
        extra_positions=2,
        names=_PLAIN_HEADS | {"intermediate": "ffn_dim", "attention_bias": None, "activation": "activation_function"},
        defaults=_ALWAYS_BIASED | {"tied_embeddings": True},
        requires=_OPT_REQUIRES,
    ),
    "gpt_neox": Family(_NEOX, "gelu", norm_vectors=2, names=_PLAIN_HEADS, defaults=_ALWAYS_BIASED),
    "bloom": Family(
        _BLOOM,
        "bloom_gelu",
        norm_vectors=2,
        outer_norms=2,
        names=_PLAIN_HEADS
        | {"layers": "n_layer", "heads": "n_head", "intermediate": None, "max_length": "seq_length"}
        | {"attention_bias": None, "activation": None},
        defaults=_ALWAYS_BIASED | {"tied_embeddings": True, "max_length": 2048},
    ),
    "phi": Family(
        _PHI,
        "gelu_new",
        norm_vectors=2,
        norms_per_block=1,
        head_bias=True,
        names={"head_dim": None, "attention_bias": None},
        defaults=_ALWAYS_BIASED,
        requires={"qk_layernorm": False},
    ),
    "llama": Family(_LLAMA, "silu", norm_vectors=1, names={"mlp_bias": "mlp_bias"}, defaults=_GATED),
    "mistral": Family(_LLAMA, "silu", norm_vectors=1, names={"attention_bias": None}, defaults=_GATED),
    "gemma": Family(_LLAMA, "gelu_pytorch_tanh", norm_vectors=1, defaults=_GATED | {"tied_embeddings": True}),
    "qwen2": Family(
        _QWEN2,
        "silu",
        norm_vectors=1,
        names={"head_dim": None, "attention_bias": None},
        defaults=_GATED | {"attention_bias": True},
    ),
    "qwen3": Family(_LLAMA, "silu", norm_vectors=1, norms_queries_and_keys=True, defaults=_GATED),
    "glm": Family(_GLM, "silu", norm_vectors=1, defaults=_GATED | {"attention_bias": True}),
    "glm4": Family(_GLM, "silu", norm_vectors=1, norms_per_block=4, defaults=_GATED | {"attention_bias": True}),
    "glm_blank_infilling": Family(
        _NEOX,
        "gelu_pytorch_tanh",
        norm_vectors=2,
        position_tables=2,  # of the token in the text, and inside its blank
        extra_positions=1,
        names=_PLAIN_HEADS
        | {"layers": "num_layers", "intermediate": None, "max_length": "max_sequence_length"}
        | {"tied_embeddings": None, "attention_bias": None, "activation": None},
        defaults=_ALWAYS_BIASED | {"tied_embeddings": True},
        requires={"block_position_encoding": True},
    ),
}


def family_named(name: str) -> Family:
    """Raises ConfigError, naming the families there are."""
    if name not in FAMILIES:
        raise ConfigError([f"The model family {name!r} is not known; the known ones are {', '.join(FAMILIES)}."])
    return FAMILIES[name]
