"""Each config group against its class; pydantic's errors as sentences: what was given, what is wrong, what to write.

Examples of right values are looked up in `conf/`, where the defaults live.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, TypeAdapter, ValidationError

from rlhf.config import AllConfig, Config, ConfigError, PpoConfig, RmConfig, SftConfig

CONF = Path(__file__).parent.parent / "conf"
STAGES: dict[str, type[BaseModel]] = {"sft": SftConfig, "rm": RmConfig, "ppo": PpoConfig, "all": AllConfig}


def groups(given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The groups that are fine, as their classes, and a sentence for every problem of the others."""
    problems = [_unknown((key,), value, Config) for key, value in given.items() if key not in Config.model_fields]
    valid = dict[str, Any]()
    for name, field in Config.model_fields.items():
        if name not in given:
            problems.append(f"{name} is missing; write {_suggestion((name,), {})}")
            continue
        model: Any = field.annotation
        constrained: Any = Annotated[model, field]
        if name == "stage":
            stage = given[name].get("name") if isinstance(given[name], dict) else None
            if stage not in STAGES:
                problems.append(f"stage.name={_shown(stage)} is not a stage; write one of stage={', '.join(STAGES)}")
                continue
            model = constrained = STAGES[stage]
        try:
            valid[name] = TypeAdapter(constrained).validate_python(given[name])
        except ValidationError as error:
            problems += _sentences(error, name, model, given)
    return valid, problems


def plain(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """Interpolations resolved; values still to be given (???) are left out. Raises ConfigError."""
    tree = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(cfg)
    try:
        missing = sorted(OmegaConf.missing_keys(tree))
        resolved = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([f"The configuration refers to something that is not there: {error}"]) from error
    assert isinstance(resolved, dict)
    named = {str(key): value for key, value in resolved.items()}
    for path in missing:
        *parents, last = path.split(".")
        node: Any = named
        for part in parents:
            node = node[part]
        del node[last]
    return named


def _sentences(error: ValidationError, group: str, model: Any, given: dict[str, Any]) -> Iterator[str]:
    """One sentence per field: a union reports an error for each of its members."""
    seen = set()
    for item in error.errors():
        path, owner = _locate(item["loc"], group, model)
        if path in seen:
            continue
        seen.add(path)
        value: Any = given
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if item["type"] == "extra_forbidden":
            yield _unknown(path, value, owner)
        elif item["type"] == "missing" and len(item["loc"]) < len(path):  # otherwise an element of a list is
            yield f"{'.'.join(path)} is missing; write {_suggestion(path, _schema(owner, path[-1]))}"
        else:
            schema = _schema(owner, path[-1])
            yield (f"{'.'.join(path)}={_shown(value)} is not {_description(schema)}; write {_suggestion(path, schema)}")


def _locate(loc: Sequence[int | str], group: str, model: Any) -> tuple[tuple[str, ...], type[BaseModel]]:
    """The field (or unknown key) that pydantic's `loc` is about, without list indices and names of union members."""
    path, owner = (group,), Config
    inner = model if isinstance(model, type) and issubclass(model, BaseModel) else None
    for part in loc:
        if inner is None:
            break
        path, owner = (*path, str(part)), inner
        field = inner.model_fields.get(str(part))
        types = () if field is None else (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in types if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return path, owner


def _unknown(path: tuple[str, ...], value: Any, owner: type[BaseModel]) -> str:
    *parents, key = path
    prefix = "".join(f"{part}." for part in parents)
    near = difflib.get_close_matches(key, owner.model_fields, n=1)
    elsewhere = [name for name in Config.model_fields if key in _fields_of(name)]
    if near:
        cure = f"did you mean {prefix}{near[0]}? Write {prefix}{near[0]}=..."
    elif elsewhere:
        cure = f"write {' or '.join(f'{name}.{key}' for name in elsewhere)}=..."
    else:
        cure = f"write one of {', '.join(prefix + name for name in owner.model_fields)}"
    return f"{prefix}{key}={_shown(value)} is not a known key; {cure}"


def _fields_of(group: str) -> set[str]:
    if group == "stage":
        return {field for model in STAGES.values() for field in model.model_fields}
    annotation = Config.model_fields[group].annotation
    return set(annotation.model_fields) if isinstance(annotation, type) and issubclass(annotation, BaseModel) else set()


def _schema(owner: type[BaseModel], field: str) -> dict[str, Any]:
    return owner.model_json_schema()["properties"][field]


def _description(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_description(part) for part in schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(map(_shown, schema['enum']))}"
    if "const" in schema:
        return _shown(schema["const"])
    match schema.get("type"):
        case "integer" | "number" as kind:
            return _number(schema, "whole number" if kind == "integer" else "number")
        case "array":
            length = f" of {schema['minItems']} values" if schema.get("minItems") else ""
            items = schema.get("items") or schema["prefixItems"][0]
            return f"a list{length}, each {_description(items)}"
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "null":
            return "null"
    return "a group of keys"


def _number(schema: dict[str, Any], noun: str) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    if bounds == ["above 0"]:
        return f"a positive {noun}"
    return f"a {noun} {' and '.join(bounds)}".rstrip()


def _suggestion(path: tuple[str, ...], schema: dict[str, Any]) -> str:
    """`key=value` with a value that this repository's own configuration has."""
    if "enum" in schema:
        return f"{'.'.join(path)}={' or '.join(map(_shown, schema['enum']))}"
    if len(path) == 1 and (CONF / path[0]).is_dir():
        return f"{path[0]}=<one of {', '.join(sorted(file.stem for file in (CONF / path[0]).glob('*.yaml')))}>"
    example = _example(path)
    if example is None:
        kind = schema.get("type") or next(part.get("type") for part in schema["anyOf"])
        example = {"string": "<text>", "array": "[...]"}.get(kind, 1)
    return f"e.g. {'.'.join(path)}={_shown(example)}"


def _example(path: tuple[str, ...]) -> Any:
    """The first value other than null that `conf/` gives to this key."""
    group, *keys = path
    if group == "stage" and keys[0] in STAGES:
        keys = keys[1:]
    files = sorted((CONF / group).glob("*.yaml"))
    for file in files or [CONF / "train.yaml"]:
        value = OmegaConf.select(OmegaConf.load(file), ".".join(keys if files else path))
        if value is not None:
            return OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
    return None


def _shown(value: Any) -> str:
    """As it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{...}"
    return repr(value) if value == "" else str(value)
