import dataclasses
import subprocess
import sys
from itertools import product

import pytest
import yaml
from pydantic import ValidationError

from rlhf import validation
from rlhf.config import AllConfig, Config, ConfigError, PpoConfig, RmConfig, SftConfig, from_yaml, parse, to_yaml
from rlhf.joined import Joined
from tests.configs import CPU, ROOT, composed, machine, options, parsed, plain, problems, with_option

GROUPS = ("framework", "stage", "zero", "lora", "precision", "hardware", "model", "data", "reward")


def test_every_option_of_every_group_is_valid_by_itself():
    seen = 0
    base = plain(composed())
    for group in GROUPS:
        for option in options(group):
            cfg = plain(composed(f"stage={option}")) if group == "stage" else with_option(base, group, option)
            valid, sentences = validation.groups(cfg)
            assert sentences == [] and valid.keys() == Config.model_fields.keys()
            seen += 1
    assert seen == sum(1 for group in GROUPS for _ in (ROOT / "conf" / group).glob("*.yaml")) >= 70


def test_the_defaults_can_run():
    config = parsed()
    assert config.framework.name == "dschat" and config.zero.zero_stage == 2
    assert config.warnings == ()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("lora.rank=-3", "lora.rank=-3 is not a positive whole number; write e.g. lora.rank=16"),
        ("lora.rank=1.5", "lora.rank=1.5 is not a positive whole number; write e.g. lora.rank=16"),
        ("lora.dropout=1", "lora.dropout=1 is not a number at least 0 and below 1; write e.g. lora.dropout=0.0"),
        ("lora.targets=3", "lora.targets=3 is not one of qkv, all or a list, each text; write e.g. lora.targets=all"),
        ("lora.alpha=0", "lora.alpha=0 is not a positive number or null; write e.g. lora.alpha=1"),
        ("seed=x", "seed=x is not a whole number at least 0; write e.g. seed=0"),
        ("precision.tf32=maybe", "precision.tf32=maybe is not true or false; write e.g. precision.tf32=true"),
        (
            "precision.dtype=int8",
            "precision.dtype=int8 is not one of fp32, fp16, bf16; write precision.dtype=fp32 or fp16 or bf16",
        ),
        ("zero.zero_stage=4", "zero.zero_stage=4 is not one of 0, 1, 2, 3; write zero.zero_stage=0 or 1 or 2 or 3"),
        (
            "stage.betas=[0.9]",
            "stage.betas=[0.9] is not a list of 2 values, each a number at least 0 and below 1; "
            "write e.g. stage.betas=[0.9,0.95]",
        ),
        ("lora.rank=inf", "lora.rank=inf is not a positive whole number; write e.g. lora.rank=16"),
        ("lora.alpha=nan", "lora.alpha=nan is not a positive number or null; write e.g. lora.alpha=1"),
        ("stage.rm.epochs=0", "stage.rm.epochs=0 is not a positive whole number; write e.g. stage.rm.epochs=1"),
        ("stage.name=dpo", "stage.name=dpo is not a stage; write one of stage=sft, rm, ppo, all"),
        (
            "model.shape.layers=0",
            "model.shape.layers=0 is not a positive whole number; write e.g. model.shape.layers=24",
        ),
        (
            "wandb.mode=on",
            "wandb.mode=on is not one of online, offline, disabled; write wandb.mode=online or offline or disabled",
        ),
        ("+lora.rnak=3", "lora.rnak=3 is not a known key; did you mean lora.rank? Write lora.rank=..."),
        ("+learning_rate=1", "learning_rate=1 is not a known key; write stage.learning_rate or lora.learning_rate=..."),
        (
            "+zero.q=1",
            "zero.q=1 is not a known key; write one of zero.zero_stage, zero.offload_optimizer, "
            "zero.offload_parameters, zero.gather_for_generation",
        ),
        ("~lora.rank", "lora.rank is missing; write e.g. lora.rank=16"),
        ("~zero", "zero is missing; write zero=<one of 0, 1, 2, 3>"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_right(override, sentence):
    assert problems(override) == [sentence]


def test_all_problems_come_at_once_and_a_bad_group_does_not_hide_rules_among_the_others():
    found = problems(
        "lora.rank=-3", "lora.dropout=7", "seed=-1", "zero.offload_parameters=true", "hardware=v100_32g_x8"
    )
    starts = ("lora.rank=-3", "lora.dropout=7", "seed=-1", "precision=bf16", "zero.offload_parameters", "hardware=v100")
    assert len(found) == len(starts)
    assert all(any(sentence.startswith(start) for sentence in found) for start in starts)


def test_a_value_still_to_be_given_is_missing_and_a_broken_reference_is_explained():
    assert problems("model.path=???") == ["model.path is missing; write e.g. model.path=bigscience/bloom-560m"]
    (sentence,) = problems("data.system=${nowhere}")
    assert "nowhere" in sentence


def test_the_result_is_frozen():
    config = parsed()
    with pytest.raises(ValidationError):
        config.lora.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize("stage", ["sft", "rm", "ppo", "all"])
def test_round_trip(stage, tmp_path):
    config = parsed(
        f"stage={stage}", "hardware=auto", "lora=qkv", "lora.targets=[q_proj,v_proj]", "wandb.tags=[off,'1']"
    )
    assert parse(config.model_dump(), machine=CPU) == config
    assert parse(yaml.safe_load(to_yaml(config)), machine=CPU) == config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert from_yaml(tmp_path / "config.yaml") == config


def test_from_yaml_detects_nothing_again(tmp_path):
    config = parsed(on=machine(gpus=8, memory_gib=80.0))
    (tmp_path / "config.yaml").write_text(to_yaml(config))  # this machine is another one
    again = from_yaml(tmp_path / "config.yaml")
    assert (again.hardware.device, again.hardware.devices) == ("cuda", 8)
    assert again == config


def test_from_yaml_names_the_file_and_the_problem(tmp_path):
    text = to_yaml(parsed()).replace("seed: 0", "seed: -1")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml: seed=-1 is not a whole number"):
        from_yaml(tmp_path / "config.yaml")


def test_stages_in_order():
    def names(*overrides: str) -> list[str]:
        return [stage.name for stage in parsed(*overrides).stages]

    assert names("stage=sft") == ["sft"] and names("stage=rm") == ["rm"]
    assert names("stage=ppo") == ["rm", "ppo"]
    assert names("stage=ppo", "reward=function") == ["ppo"]
    assert names("stage=ppo", "reward.path=conf") == ["ppo"]
    assert names("stage=all") == ["sft", "rm", "ppo"]


@pytest.mark.parametrize("stage", ["ppo", "all"])
def test_for_stage_leaves_one_stage(stage):
    config = parsed(f"stage={stage}")
    classes = {"sft": SftConfig, "rm": RmConfig, "ppo": PpoConfig}
    assert isinstance(config.stage, AllConfig if stage == "all" else PpoConfig)
    for part in config.stages:
        alone = config.for_stage(part)
        assert isinstance(alone.stage, classes[part.name])
        assert alone.stages == (alone.stage,)
        assert Config.model_validate(yaml.safe_load(to_yaml(alone))) == alone


def test_stage_keys_as_typed():
    assert parsed("stage=ppo", "stage.learning_rate=1e-6").stages[-1].learning_rate == 1e-6
    assert parsed("stage=ppo", "stage.rm.learning_rate=1e-6").stages[0].learning_rate == 1e-6
    rates = [stage.learning_rate for stage in parsed("stage=all", "stage.rm.learning_rate=1e-6").stages]
    assert rates == [5e-6, 1e-6, 5e-6]


def test_hardware_is_found_and_what_is_stated_stays():
    found = parsed(on=machine(gpus=4, memory_gib=80.0, compute_capability=9.0)).hardware
    assert (found.device, found.devices, found.device_memory_gib, found.compute_capability) == ("cuda", 4, 80.0, 9.0)
    assert found.ranks == 4
    found = parsed().hardware
    assert (found.device, found.devices, found.device_memory_gib, found.host_memory_gib) == ("cpu", 1, None, 16.0)
    stated = parsed("hardware.devices=2", "hardware.device_memory_gib=40", on=machine(gpus=4)).hardware
    assert (stated.devices, stated.device_memory_gib) == (2, 40.0)
    assert parsed("hardware=cpu", on=machine(gpus=4)).hardware.device == "cpu"


def test_under_a_launcher_its_ranks_count():
    place = Joined(rank=0, world_size=8, local_rank=0, local_world_size=4, address="node0", port=29500)
    on = dataclasses.replace(machine(gpus=4), joined=place)
    hardware = parsed(on=on, folder_given=False).hardware
    assert (hardware.devices, hardware.nodes, hardware.ranks) == (4, 2, 8)
    (sentence,) = problems("hardware.devices=2", on=on)
    assert sentence.endswith("is 2; write hardware.devices=4 hardware.nodes=2")


MICRO, RANKS, ACCUMULATION, TOTAL = (None, 1, 3, 4), (1, 2, 8), (None, 1, 4), (None, 12, 32, 128)


def test_batch_arithmetic_of_every_combination():
    accepted = refused = 0
    base = composed("stage=sft", "hardware=cpu", "precision=fp32")
    for micro, ranks, accumulation, total in product(MICRO, RANKS, ACCUMULATION, TOTAL):
        base.hardware.devices = ranks
        base.stage.update(micro_batch=micro, accumulation=accumulation, total_batch=total)
        given = [micro, accumulation, total]
        if given.count(None) > 1:
            possible = False
        elif total is None:
            possible = True
        else:
            known = (micro or 1) * ranks * (accumulation or 1)
            possible = total == known if None not in given else total % known == 0
        try:
            stage = parse(base, machine=CPU).stage
        except ConfigError as error:
            assert not possible, error
            assert "total_batch" in str(error) and "; write " in str(error)
            refused += 1
            continue
        assert possible and isinstance(stage, SftConfig)
        assert stage.total_batch == stage.micro_batch * ranks * stage.accumulation  # type: ignore[operator]
        assert all(
            wish in (None, got)
            for wish, got in zip(given, (stage.micro_batch, stage.accumulation, stage.total_batch), strict=True)
        )
        accepted += 1
    assert accepted + refused == 4 * 3 * 3 * 4
    assert accepted == 55


def test_the_articles_own_batch_numbers_contradict_each_other():
    """It states a total batch of 32, 4 per GPU on 8 GPUs, and accumulation 4: that makes 128."""
    article = ("stage=sft", "stage.total_batch=32", "stage.micro_batch=4", "stage.accumulation=4")
    (sentence,) = problems(*article, "hardware=a100_80g_x8", training=False)
    assert "4 x 8 x 4 = 128" in sentence
    assert sentence.endswith("write stage.total_batch=128, or stage.accumulation=1, or stage.micro_batch=1")
    for cure in ("stage.total_batch=128", "stage.accumulation=1", "stage.micro_batch=1"):
        assert problems(*article, "hardware=a100_80g_x8", cure, training=False) == []


def test_each_stage_of_a_job_has_its_own_batch():
    found = problems("stage=all", "stage.rm.accumulation=3", "stage.ppo.micro_batch=5", "hardware=cpu")
    assert [sentence.split("=")[0] for sentence in found] == ["stage.rm.total_batch", "stage.ppo.total_batch"]
    # The reward model is not trained here, so its numbers do not matter.
    assert problems("stage=ppo", "reward=function", "stage.rm.accumulation=3") == []


def test_no_torch():
    code = "import sys; from tests.configs import parsed; parsed('lora=qkv'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
