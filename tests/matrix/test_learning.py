"""That the stages learn: loss falls, preferences are told apart, the reward rises. A few seconds a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from rlhf.config import ConfigError
from rlhf.models.build import load_tokenizer
from tests.matrix import cells

pytestmark = pytest.mark.timeout(600)

FULL_RATE, LORA_RATE = 3e-3, 2e-2
# name: stage, lora, ranks, keys
SUPERVISED = {
    "sft-off": ("sft", "off", 1, {"stage__steps": 60, "stage__learning_rate": 2e-2}),
    "sft-all": ("sft", "all", 2, {"stage__steps": 60}),
    "rm-off": ("rm", "off", 1, {"stage__steps": 30}),
    "rm-qkv": ("rm", "qkv", 2, {"stage__steps": 30}),
}
# 40 rollouts of 32 answers from sft-off's model
ROLLOUTS = {
    "stage__steps": 40,
    "stage__rollout_batch": 32,
    "stage__rollout_micro_batch": None,
    "stage__total_batch": 16,
    "stage__micro_batch": 16,
    "stage__critic_learning_rate": 3e-3,
    "stage__whiten_advantages": True,
    "data__max_answer_length": 8,
    "stage__kl_coefficient": 0.02,
}
PPO = {
    "ppo-off": ("off", 1, {}),
    "ppo-all": ("all", 1, {"lora__learning_rate": 5e-3, "stage__kl_coefficient": 0.0}),
    "ppo-2-ranks": ("off", 2, {"stage__micro_batch": 8}),
    "ppo-model": ("off", 1, {"reward": "model"}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, cells.Cell]:
    folder = tmp_path_factory.mktemp("learning")
    data = {f"data__{key}": value for key, value in cells.write_data(folder / "data", rows=120).items()}
    rates = {"stage__learning_rate": FULL_RATE, "lora__learning_rate": LORA_RATE}
    found: dict[str, cells.Cell] = {}

    def add(name: str, stage: str, lora: str, ranks: int, base, **keys) -> None:
        groups = {"lora": lora, "zero": "2"}
        config = cells.configured(base, groups, **data, **rates | keys, hardware__devices=ranks)
        found[name] = cells.Cell(folder / name, config)

    bases = {stage: cells.base(stage, "precision=fp32") for stage in ("sft", "rm")}
    for name, (stage, lora, ranks, keys) in SUPERVISED.items():
        add(name, stage, lora, ranks, bases[stage], **keys)
    run_all(found, list(SUPERVISED))
    for name, (lora, ranks, keys) in PPO.items():
        keys = dict(keys)
        if keys.pop("reward", None) == "model":
            overrides = [f"reward.path={folder / 'rm-off' / 'model'}"]
        else:
            overrides = ["reward=function", "reward.function=tests.matrix.letters.share_of_a"]
        model = {"model__path": str(folder / "sft-off" / "model"), "model__random_init": False}
        base = cells.base("ppo", "precision=fp32", *overrides)
        add(name, "ppo", lora, ranks, base, **model, **{**ROLLOUTS, "stage__learning_rate": 1e-3, **keys})
    run_all(found, list(PPO))
    return found


def run_all(found: dict[str, cells.Cell], names: list[str]) -> None:
    for ranks in (1, 2):
        cells.run([found[name] for name in names if found[name].config.hardware.ranks == ranks], ranks, timeout=500)
    for name in names:
        assert found[name].result["status"] == "ok", (name, found[name].result["error"])


@pytest.mark.parametrize("name", ["sft-off", "sft-all"])
def test_sft_loss_falls(runs, name) -> None:
    run = runs[name]
    heldout = [row["heldout/loss"] for row in run.rows() if "heldout/loss" in row]
    assert len(heldout) == 2
    # Full: the answers are letters of three kinds and an end, about 1.4 nats a token. Under LoRA the random embeddings,
    # which are the output layer too, stay as small as they are, and no logit can get far above the others.
    assert heldout[1] < {"sft-off": 1.5, "sft-all": heldout[0] - 0.3}[name]
    assert run.result["metrics"]["heldout_loss"] == heldout[1]


@pytest.mark.parametrize("name", ["rm-off", "rm-qkv"])
def test_reward_model_tells_preferences_apart(runs, name) -> None:
    run = runs[name]
    before = next(row["heldout/accuracy"] for row in run.rows() if "heldout/accuracy" in row)
    assert before < 0.9 < run.result["metrics"]["rm_accuracy"]
    assert run.result["metrics"]["rm_margin"] > 1
    statistics = json.loads((run.folder / "model" / "reward_statistics.json").read_text())
    assert statistics["count"] == 200 and statistics["std"] > 0.5


@pytest.mark.parametrize("name", PPO)
def test_ppo_raises_the_reward(runs, name) -> None:
    metrics = runs[name].result["metrics"]
    before, spread, after = (metrics[f"heldout_reward_{part}"] for part in ("before", "before_std", "after"))
    assert after > before + 0.8 * spread, metrics
    curve = [row["reward/mean"] for row in runs[name].rows() if "reward/mean" in row]
    assert len(curve) == 40
    assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5 + 0.5 * spread


@pytest.mark.parametrize("name", PPO)
def test_the_first_rollout_is_the_reference_itself(runs, name) -> None:
    first = next(row for row in runs[name].rows() if "kl/signed" in row)
    assert first["step"] == 1
    assert abs(first["kl/signed"]) < 1e-6 and 0 <= first["kl/nonnegative"] < 1e-6
    for row in runs[name].rows():
        # what generation saw through its cache is what the update sees without one
        assert row.get("sampling/log_prob_gap", 0) < 1e-5


def test_critic_starts_as_the_reward_model(runs) -> None:
    """A48. The stage compares both on a probe batch; here that the first values are the scores, from another side."""
    from rlhf.models.build import build_scalar

    config = runs["ppo-model"].config
    assert config.stage.name == "ppo" and config.stage.critic_from_reward_model
    tokenizer = load_tokenizer(config.model, config.model.path)
    critic = build_scalar(config, config.reward.path, tokenizer, torch.device("cpu"), adapters=True, trained_head=True)
    assert config.reward.path is not None
    reward = AutoModelForSequenceClassification.from_pretrained(config.reward.path)
    row = {key: value[:1] for key, value in cells.probe_inputs().items()}
    with torch.no_grad():
        assert torch.equal(critic(**row)[0, -1:], reward(**row).logits[0])


def test_a_reward_model_without_its_head_is_refused(runs, tmp_path: Path) -> None:
    source = runs["ppo-model"].config
    headless = tmp_path / "headless"
    headless.mkdir()
    assert source.reward.path is not None
    for file in Path(source.reward.path).iterdir():
        (headless / file.name).write_bytes(file.read_bytes())
    tensors = load_file(headless / "model.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if key != "score.weight"},
        headless / "model.safetensors",
        {"format": "pt"},
    )
    config = source.model_copy(update={"reward": source.reward.model_copy(update={"path": str(headless)})})
    run = cells.Cell(tmp_path / "run", config)
    cells.run([run])
    error = run.result["error"]
    assert error["type"] == ConfigError.__name__ and "no trained score head" in error["message"]
    assert "left with 2" in (run.folder / "rank_0.log").read_text()
