"""What is known of a model without torch: its LoRA targets, its transformers config, its number of parameters.

Counts equal what transformers and peft build (tests/models/test_families.py compares them on the meta device).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rlhf.config import ConfigError, ModelShape
from rlhf.models.family_table import FAMILIES, OLDER_NAMES, USUAL_NAMES, Family, Layer, family_named


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block of a given shape; sizes are elements."""

    layer: Layer
    inputs: int
    outputs: int
    has_bias: bool

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + (self.outputs if self.has_bias else 0)


def known_linear_names(family: str) -> list[str]:
    """Names of the linear layers of a block, without the path to them, each once."""
    return list(dict.fromkeys(layer.name for layer in family_named(family).layers))


def target_modules(family: str, targets: str | Sequence[str]) -> list[str]:
    """Module names for peft. `targets` is "qkv", "all" (every linear layer of a block) or a list of names.

    A name may carry a part of its path, as `attn.c_proj`. Raises ConfigError when a name matches nothing (A23). Names
    given for a family not known here are returned unchecked.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    if family not in FAMILIES:
        if targets not in ("qkv", "all"):
            return names
        raise ConfigError(
            [
                f"lora.targets={targets} means nothing for a {family} model, whose layers are not known here; "
                f"write lora.targets as a list of module names, or use one of the families {', '.join(FAMILIES)}."
            ]
        )
    layers = FAMILIES[family].layers
    if targets == "all":
        return known_linear_names(family)
    if targets == "qkv":
        return [layer.name for layer in layers if layer.is_qkv]
    if unmatched := [name for name in names if not any(_matches(layer, name) for layer in layers)]:
        raise ConfigError(
            [
                f"lora.targets names {', '.join(unmatched)}, which no linear layer of a {family} model is called; "
                f"write qkv, all, or a list of {', '.join(known_linear_names(family))}."
            ]
        )
    return names


def _matches(layer: Layer, target: str) -> bool:
    """peft's rule: the whole path, or its end from a dot on."""
    return f".{layer.path}".endswith(f".{target}")


def shape_problems(shape: ModelShape) -> list[str]:
    """One sentence per field that the family's class cannot have."""
    family = family_named(shape.family)
    problems = []
    for name in ModelShape.model_fields:
        if name == "family" or family.name_of(name) is not None:
            continue
        given, needed = getattr(shape, name), _default(family, name, shape.model_dump())
        if given != needed:
            problems.append(
                f"model.shape.{name} is {given}, but a {shape.family} model of this size always has {needed}; "
                f"write {needed}, or another model.shape.family."
            )
    if family.name_of("head_dim") is None and shape.hidden % shape.heads:
        problems.append(
            f"model.shape.hidden is {shape.hidden} and model.shape.heads is {shape.heads}: "
            f"{shape.family} models share hidden evenly between the heads; write a multiple of {shape.heads}."
        )
    if shape.heads % shape.kv_heads:
        problems.append(
            f"model.shape.heads is {shape.heads} and model.shape.kv_heads is {shape.kv_heads}: "
            "write a number of kv_heads that divides the number of heads."
        )
    return problems


def _default(family: Family, name: str, known: Mapping[str, Any]) -> int | None:
    """The field's value when config.json does not give it; None where it must."""
    if name in family.defaults:
        return family.defaults[name]
    match name:
        case "kv_heads":
            return known["heads"]
        case "head_dim":
            return known["hidden"] // known["heads"]
        case "intermediate":
            return 4 * known["hidden"]
        case "gated_mlp" | "tied_embeddings" | "attention_bias" | "mlp_bias":
            return False
    return None


def config_arguments(shape: ModelShape) -> dict[str, Any]:
    """Keyword arguments that make the config class of `shape.family` describe this shape.

    `AutoConfig.for_model(shape.family, **config_arguments(shape))`. Raises ConfigError as `shape_problems` says.
    """
    if problems := shape_problems(shape):
        raise ConfigError(problems)
    family = family_named(shape.family)
    values = shape.model_dump(exclude={"family"}) | {"activation": family.activation}
    arguments = {key: value for name, value in values.items() if (key := family.name_of(name)) is not None}
    # Some classes default to a pad id outside a small vocabulary, and freeze that row of the embedding.
    return {**arguments, **family.requires, "pad_token_id": None}


def shape_of(config_json: Mapping[str, Any]) -> ModelShape:
    """The shape that a Hugging Face config.json describes. Raises ConfigError for a family or a variant not known."""
    model_type = config_json.get("model_type")
    # The first GLM shares its model_type with transformers' own glm (GLM-4), which has no `num_layers`.
    name = "glm_blank_infilling" if model_type == "glm" and "num_layers" in config_json else model_type
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError([f"config.json has the model_type {model_type!r}; the families known here are {known}."])
    family = FAMILIES[name]
    for key, needed in family.requires.items():
        if config_json.get(key, needed) != needed:
            raise ConfigError(
                [f"config.json has {key} {config_json[key]!r}; {name} is known here with {needed!r} only."]
            )
    values: dict[str, Any] = {"family": name}
    for shape_field in ModelShape.model_fields:
        if shape_field != "family":
            values[shape_field] = _read(family, shape_field, config_json, values)
    try:
        return ModelShape(**values)
    except ValidationError as error:
        details = [f"config.json: {item['loc'][0]} is {item['input']!r}: {item['msg']}." for item in error.errors()]
        raise ConfigError(details) from error


def _read(family: Family, name: str, config_json: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    key = family.name_of(name)
    if key is not None:
        for spelling in (key, USUAL_NAMES[name], OLDER_NAMES.get(name)):
            if spelling is not None and config_json.get(spelling) is not None:
                return config_json[spelling]
    value = _default(family, name, known)
    if value is None:
        raise ConfigError([f"config.json has no {key}, which a {known['family']} model needs."])
    return value


def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """The linear layers of one block, in the order of its forward pass."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = {
        "hidden": shape.hidden,
        "queries": queries,
        "keys": keys,
        "queries_keys_values": queries + 2 * keys,
        "intermediate": shape.intermediate,
        "two_intermediates": 2 * shape.intermediate,
    }
    return tuple(
        Linear(
            layer=layer,
            inputs=widths[layer.inputs],
            outputs=widths[layer.outputs],
            has_bias=layer.bias is not None and getattr(shape, layer.bias),
        )
        for layer in family_named(shape.family).layers
    )


@dataclass(frozen=True)
class ParameterCount:
    """Elements, tied weights once: `head` is 0 where the output layer is the embedding."""

    embeddings: int
    positions: int
    attention: int
    mlp: int
    norms: int
    head: int
    block: int  # one block: its share of attention, mlp and norms

    @property
    def backbone(self) -> int:
        """All but the output layer. A reward model or critic is this and `hidden` elements for its scalar head."""
        return self.embeddings + self.positions + self.attention + self.mlp + self.norms

    @property
    def total(self) -> int:
        return self.backbone + self.head


def parameter_count(shape: ModelShape) -> ParameterCount:
    """Parameters of the causal language model of this shape."""
    family = family_named(shape.family)
    attention = sum(linear.parameters for linear in linears(shape) if not linear.layer.in_mlp)
    mlp = sum(linear.parameters for linear in linears(shape) if linear.layer.in_mlp)
    norm = family.norm_vectors * shape.hidden
    block_norms = family.norms_per_block * norm + (2 * shape.head_dim if family.norms_queries_and_keys else 0)
    embeddings = shape.vocabulary * shape.hidden
    return ParameterCount(
        embeddings=embeddings,
        positions=family.position_tables * (shape.max_length + family.extra_positions) * shape.hidden,
        attention=shape.layers * attention,
        mlp=shape.layers * mlp,
        norms=shape.layers * block_norms + family.outer_norms * norm,
        head=(0 if shape.tied_embeddings else embeddings) + (shape.vocabulary if family.head_bias else 0),
        block=attention + mlp + block_norms,
    )


def lora_parameter_count(shape: ModelShape, rank: int, targets: str | Sequence[str]) -> int:
    """Elements of peft's A (rank x inputs) and B (outputs x rank) over all blocks."""
    names = target_modules(shape.family, targets)
    return shape.layers * sum(
        rank * (linear.inputs + linear.outputs)
        for linear in linears(shape)
        if any(_matches(linear.layer, name) for name in names)
    )
