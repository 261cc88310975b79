"""One setting at a time against the run without it: what may change, and what must not."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf.generation import CHECK_EVERY
from tests.matrix import cells

pytestmark = pytest.mark.timeout(600)

# Answers long enough that ranks look, every 8 tokens, whether anybody still samples; of a model that ends some early.
LONG = {"data__max_answer_length": 20, "model__path": "sft-long"}
# stage, groups, keys, ranks by name. All fp32.
VARIANTS: dict[str, tuple[str, dict[str, str], dict[str, object], int]] = {
    "sft": ("sft", {"zero": "2"}, {}, 1),
    "sft-long": ("sft", {"zero": "2"}, {"stage__steps": 30}, 1),
    "sft-1x8": ("sft", {"zero": "2"}, {"stage__micro_batch": 8}, 1),
    "sft-2x4": ("sft", {"zero": "2"}, {"stage__micro_batch": 4}, 1),
    "sft-8x1": ("sft", {"zero": "2"}, {"stage__micro_batch": 1}, 1),
    "sft-2-ranks-4x1": ("sft", {"zero": "2"}, {"stage__micro_batch": 1}, 2),
    "sft-packing": ("sft", {"zero": "2"}, {"stage__packing": True}, 1),
    "sft-packing-3": ("sft", {"zero": "3"}, {"stage__packing": True}, 1),
    "sft-checkpointing": ("sft", {"zero": "2"}, {"model__gradient_checkpointing": True}, 1),
    "sft-checkpointing-3": ("sft", {"zero": "3"}, {"model__gradient_checkpointing": True}, 1),
    "sft-offload-1": ("sft", {"zero": "1"}, {"zero__offload_optimizer": True}, 1),
    "sft-offload-2": ("sft", {"zero": "2"}, {"zero__offload_optimizer": True}, 1),
    "sft-offload-3": ("sft", {"zero": "3"}, {"zero__offload_optimizer": True}, 1),
    "sft-offload-parameters": ("sft", {"zero": "3"}, {"zero__offload_parameters": True}, 1),
    "sft-offload-both": ("sft", {"zero": "3"}, {"zero__offload_optimizer": True, "zero__offload_parameters": True}, 2),
    "rm": ("rm", {"zero": "2"}, {}, 1),
    "rm-1x8": ("rm", {"zero": "2"}, {"stage__micro_batch": 8}, 1),
    "rm-2-ranks-2x2": ("rm", {"zero": "2"}, {"stage__micro_batch": 2}, 2),
    "rm-checkpointing": ("rm", {"zero": "2"}, {"model__gradient_checkpointing": True}, 1),
    "rm-lora": ("rm", {"zero": "2", "lora": "qkv"}, {}, 1),
    "rm-lora-checkpointing": ("rm", {"zero": "2", "lora": "qkv"}, {"model__gradient_checkpointing": True}, 1),
    "ppo": ("ppo", {"zero": "2"}, {}, 1),
    "ppo-3": ("ppo", {"zero": "3"}, {}, 2),
    "ppo-sharded": ("ppo", {"zero": "3"}, {"zero__gather_for_generation": False, **LONG}, 2),
    "ppo-gathered": ("ppo", {"zero": "3"}, {"zero__gather_for_generation": True, **LONG}, 2),
    "ppo-micro-4": ("ppo", {"zero": "2"}, {"stage__micro_batch": 4}, 1),
    "ppo-rollout-whole": ("ppo", {"zero": "2"}, {"stage__rollout_micro_batch": None}, 1),
    "ppo-checkpointing": ("ppo", {"zero": "2"}, {"model__gradient_checkpointing": True}, 1),
    "ppo-offload-frozen": ("ppo", {"zero": "2"}, {"stage__offload_reference": True, "reward__offload": True}, 1),
    "ppo-offload-frozen-3": ("ppo", {"zero": "3"}, {"stage__offload_reference": True, "reward__offload": True}, 2),
    "ppo-offload-both": ("ppo", {"zero": "3"}, {"zero__offload_optimizer": True, "zero__offload_parameters": True}, 2),
    "ppo-ptx": ("ppo", {"zero": "2"}, {"stage__ptx_coefficient": 0.5}, 1),
    "ppo-ptx-2-ranks": ("ppo", {"zero": "3"}, {"stage__ptx_coefficient": 0.5}, 2),
    "ppo-entropy": ("ppo", {"zero": "2"}, {"stage__entropy_coefficient": 0.5}, 1),
    "ppo-ema": ("ppo", {"zero": "2"}, {"stage__ema_decay": 0.9}, 1),
    "ppo-ema-3": ("ppo", {"zero": "3"}, {"stage__ema_decay": 0.9}, 2),
    "ppo-kl-target": ("ppo", {"zero": "2"}, {"stage__kl_target": 0.001, "stage__kl_horizon": 16}, 1),
    "ppo-penalise": (
        "ppo",
        {"zero": "2"},
        {"stage__truncated_answers": "penalise", "stage__truncation_penalty": 2.0},
        1,
    ),
    "ppo-mask": ("ppo", {"zero": "2"}, {"stage__truncated_answers": "mask"}, 1),
    "ppo-critic-warmup": ("ppo", {"zero": "2"}, {"stage__critic_warmup_steps": 3}, 1),
    "ppo-kl-stop": ("ppo", {"zero": "2"}, {"stage__kl_stop": 0.05, "stage__steps": 20}, 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, cells.Cell]:
    folder = tmp_path_factory.mktemp("variants")
    models = cells.write_models(folder)
    data = {f"data__{key}": value for key, value in cells.write_data(folder / "data").items()}
    bases = {stage: cells.base(stage, "precision=fp32") for stage in ("sft", "rm", "ppo")}
    found: dict[str, cells.Cell] = {}
    for name, (stage, groups, keys, ranks) in VARIANTS.items():
        given = {**data, "model__path": models["base"], "model__random_init": False, "hardware__devices": ranks}
        if stage == "ppo":
            given["reward__path"] = models["reward"]
        if "model__path" in keys:
            keys = keys | {"model__path": str(folder / str(keys["model__path"]) / "model")}
        found[name] = cells.Cell(folder / name, cells.configured(bases[stage], groups, **given | keys))
    for ranks in (1, 2):
        cells.run([run for run in found.values() if run.config.hardware.ranks == ranks], ranks, timeout=500)
    for run in found.values():
        assert run.result["status"] == "ok", (run.folder.name, run.result["error"])
    return found


def updates(run: cells.Cell) -> list[dict[str, float]]:
    return [row for row in run.rows() if any(key.startswith("grad_norm") for key in row)]


SAME_LEARNING = [
    ("sft-1x8", "sft"),
    ("sft-2x4", "sft"),
    ("sft-8x1", "sft"),
    ("sft-2-ranks-4x1", "sft"),
    ("sft-packing", "sft"),
    ("sft-packing-3", "sft"),
    ("sft-checkpointing", "sft"),
    ("sft-checkpointing-3", "sft"),
    ("sft-offload-1", "sft"),
    ("sft-offload-2", "sft"),
    ("sft-offload-3", "sft"),
    ("sft-offload-parameters", "sft"),
    ("sft-offload-both", "sft"),
    ("rm-1x8", "rm"),
    ("rm-2-ranks-2x2", "rm"),
    ("rm-checkpointing", "rm"),
    ("rm-lora-checkpointing", "rm-lora"),
    ("ppo-3", "ppo"),
    ("ppo-micro-4", "ppo"),
    ("ppo-rollout-whole", "ppo"),
    ("ppo-checkpointing", "ppo"),
    ("ppo-offload-frozen", "ppo"),
    ("ppo-offload-frozen-3", "ppo"),
    ("ppo-offload-both", "ppo"),
    ("ppo-ema", "ppo"),
]


@pytest.mark.parametrize(("variant", "original"), SAME_LEARNING)
def test_where_and_how_it_is_computed_changes_nothing(runs, variant, original) -> None:
    """All of the first update's numbers, and the losses and norms of the later ones, which rounding has grown in."""
    found, expected = updates(runs[variant]), updates(runs[original])
    assert len(found) == len(expected) == 3
    for step, (row, wanted) in enumerate(zip(found, expected, strict=True)):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            if step == 0 or key.startswith(("loss", "grad_norm")):
                relative, absolute = (1e-5, 1e-6) if step == 0 else (2e-3, 1e-5)
                assert row[key] == pytest.approx(value, rel=relative, abs=absolute), (step, key)


def test_sharded_generation_equals_gathered_exactly(runs) -> None:
    """Ranks whose answers end at different lengths stay in step, and draw the same tokens."""
    samples = {name: runs[name].rows("samples.jsonl") for name in ("ppo-sharded", "ppo-gathered")}
    assert samples["ppo-sharded"] == samples["ppo-gathered"]
    assert runs["ppo-sharded"].rows() == runs["ppo-gathered"].rows()
    lengths = [row["length"] for row in samples["ppo-sharded"]]
    assert len(lengths) == 2 * 8  # before and after training
    # rank 0 samples 0:2 and 2:4 of each 8, rank 1 4:6 and 6:8: at some look one rank has ended and the other has not
    looks = [math.ceil(max(lengths[at : at + 2]) / CHECK_EVERY) for at in range(0, 16, 2)]
    assert looks[0:2] + looks[4:6] != looks[2:4] + looks[6:8]


def test_splitting_the_rollout_draws_the_same_answers(runs) -> None:
    whole, split = (runs[name].rows("samples.jsonl") for name in ("ppo-rollout-whole", "ppo"))
    first = [[(row["prompt"], row["answer"]) for row in rows if row["step"] == 0] for rows in (whole, split)]
    assert first[0] == first[1] and len(first[0]) == 8


def test_pretraining_loss_is_mixed_in(runs) -> None:
    plain, mixed, on_two = (updates(runs[name])[0] for name in ("ppo", "ppo-ptx", "ppo-ptx-2-ranks"))
    assert mixed["loss/ptx"] == pytest.approx(6.0, abs=0.5)
    assert mixed["loss/actor"] == pytest.approx(plain["loss/actor"] + 0.5 * mixed["loss/ptx"], rel=1e-5)
    for key in ("loss/ptx", "loss/actor", "grad_norm/actor"):
        assert on_two[key] == pytest.approx(mixed[key], rel=1e-5)


def test_entropy_is_rewarded(runs) -> None:
    plain, bonus = updates(runs["ppo"])[0], updates(runs["ppo-entropy"])[0]
    assert bonus["loss/actor"] == pytest.approx(plain["loss/actor"] - 0.5 * plain["entropy"], rel=1e-4)
    assert bonus["grad_norm/actor"] != pytest.approx(plain["grad_norm/actor"], rel=1e-3)


@pytest.mark.parametrize("name", ["ppo-ema", "ppo-ema-3"])
def test_moving_average_lies_between_start_and_end(runs, name) -> None:
    run = runs[name]
    assert run.config.model.path is not None
    start = load_file(Path(run.config.model.path) / "model.safetensors")
    end, average = (load_file(run.folder / part / "model.safetensors") for part in ("model", "ema_model"))
    assert start.keys() == end.keys() == average.keys()
    for key in start:
        travelled = (end[key] - start[key]).norm()
        # weights 0.9^3 on the start at least, and each of three steps weighs less than the whole way
        assert 0 < (average[key] - start[key]).norm() < 0.3 * travelled, key
    # saving the average put the trained weights back
    assert run.probe()["actor"].equal(runs[name.replace("-ema", "") if name == "ppo-ema" else "ppo-3"].probe()["actor"])


def test_adaptive_kl_follows_its_target(runs) -> None:
    fixed, adaptive = (updates(runs[name]) for name in ("ppo", "ppo-kl-target"))
    assert [row["kl/coefficient"] for row in fixed] == [0.1, 0.1, 0.1]
    assert adaptive[0]["kl/coefficient"] == 0.1
    for row, following in pairwise(adaptive):
        # 8 answers of a horizon of 16, the error cut to 0.2: arXiv 1909.08593, section 2.2
        error = max(-0.2, min(0.2, row["kl/per_answer"] / 0.001 - 1))
        assert following["kl/coefficient"] == pytest.approx(row["kl/coefficient"] * (1 + error * 8 / 16))


def test_truncated_answers(runs) -> None:
    kept, penalised, masked = (updates(runs[name])[0] for name in ("ppo", "ppo-penalise", "ppo-mask"))
    assert kept["answer/truncated"] > 0
    for key in ("reward/mean", "answer/truncated", "kl/signed"):  # as the reward gave them
        assert penalised[key] == kept[key] == masked[key]
    share = kept["answer/truncated"]
    assert penalised["return/mean"] < kept["return/mean"] - share
    # a masked answer teaches nothing: with every answer cut nothing would move
    assert masked["grad_norm/actor"] != pytest.approx(kept["grad_norm/actor"], rel=1e-3)


def test_only_the_critic_learns_in_its_warmup(runs) -> None:
    run = runs["ppo-critic-warmup"]
    assert run.config.model.path is not None
    start, end = (
        load_file(Path(folder) / "model.safetensors") for folder in (run.config.model.path, run.folder / "model")
    )
    assert all(torch.equal(start[key], end[key]) for key in start)
    rows = updates(run)
    assert len(rows) == 3 and all("grad_norm/critic" in row and "grad_norm/actor" not in row for row in rows)


def test_early_stop_on_kl(runs) -> None:
    run = runs["ppo-kl-stop"]
    *before, last = [row["kl/per_answer"] for row in updates(run)]
    assert last > 0.05 and max(before) <= 0.05
    assert run.result["steps"] == len(before) + 1 < 20
    events = [row for row in run.rows() if row.get("event") == "early_stop"]
    assert len(events) == 1 and "kl_stop=0.05" in events[0]["reason"]
