"""Each rule, with the combinations counted."""

import dataclasses
import functools
import json
from itertools import product

import pytest

from rlhf import rules
from rlhf.config import parse
from rlhf.joined import Joined
from tests.configs import CPU, composed, machine, options, parsed, plain, problems, refusals, with_option

BEFORE_AMPERE = {"v100_16g_x8", "v100_32g_x8", "t4_16g_x1"}


def test_precision_on_every_machine_of_conf_hardware():
    refused = set()
    machines = options("hardware")
    # A batch that fits any number of ranks: only precision is of interest.
    base = plain(composed("stage=sft", "stage.total_batch=null", "stage.accumulation=1"))
    for name, precision in product(machines, options("precision")):
        cfg = with_option(with_option(base, "hardware", name), "precision", precision)
        found = refusals(cfg, training=False)
        if found:
            cause, cure = {
                "bf16": ("needs compute capability 8.0", "write precision=fp16"),
                "fp16": ("needs a GPU", "write precision=bf16"),
            }[precision]
            assert len(found) == 1 and cause in found[0] and cure in found[0]
            refused.add((name, precision))
    assert len(machines) >= 18
    assert refused == {(name, "bf16") for name in BEFORE_AMPERE} | {(name, "fp16") for name in ("auto", "cpu")}


def test_bf16_on_the_machine_found():
    assert "7.0" in problems(on=machine(gpus=1, compute_capability=7.0))[0]
    assert problems(on=machine(gpus=1, compute_capability=8.0)) == []
    assert problems("hardware=cpu", on=machine(gpus=1, compute_capability=7.0)) == []
    assert problems("precision=fp16", on=machine(gpus=1, compute_capability=7.0)) == []


def test_offload_with_every_zero_stage():
    refused = []
    base = plain(composed("stage=sft"))
    for zero, (optimizer, parameters, gather) in product("0123", product((False, True), repeat=3)):
        cfg = with_option(base, "zero", zero)
        cfg["zero"] |= {
            "offload_optimizer": optimizer,
            "offload_parameters": parameters,
            "gather_for_generation": gather,
        }
        found = refusals(cfg)
        assert len(found) == (parameters and zero != "3") + (optimizer and zero == "0") + (gather and zero != "3")
        refused += [found] if found else []
    assert len(refused) == 7 + 6 + 6 + 0


@pytest.mark.parametrize(
    ("ranks", "rollout", "total", "micro", "sentence"),
    [
        (1, 32, 32, "null", None),
        (2, 64, 32, 32, None),
        (2, 64, 32, 33, "write stage.rollout_micro_batch=32 or less"),
        (1, 40, 32, "null", "write stage.rollout_batch=64"),
        (1, 16, 32, "null", "write stage.rollout_batch=32"),
        (3, 32, 24, "null", "write stage.rollout_batch=33"),
    ],
)
def test_rollouts_divide_into_ranks_and_optimizer_steps(ranks, rollout, total, micro, sentence):
    found = problems("reward=function", "hardware=cpu", f"hardware.devices={ranks}", f"stage.rollout_batch={rollout}",
                     f"stage.total_batch={total}", f"stage.rollout_micro_batch={micro}")  # fmt: skip
    assert (sentence is None) == (found == [])
    assert sentence is None or found[0].endswith(sentence)


def test_adaptive_kl_needs_a_coefficient():
    grid = list(product(("0", "0.1"), ("null", "6")))
    refused = [pair for pair in grid if problems(f"stage.kl_coefficient={pair[0]}", f"stage.kl_target={pair[1]}")]
    assert refused == [("0", "6")]


def test_named_hardware_must_be_here_for_training_only():
    named = ("stage=sft", "hardware=a100_80g_x8")
    (sentence,) = problems(*named)
    assert "needs 8 GPUs on this machine" in sentence and "hardware=auto" in sentence
    assert problems(*named, training=False) == []
    assert problems(*named, on=machine(gpus=8, memory_gib=79.2)) == []
    assert "needs 8 GPUs" in problems(*named, on=machine(gpus=4))[0]
    assert "GPUs of 80 GiB" in problems(*named, on=machine(gpus=8, memory_gib=39.5))[0]
    assert "compute capability" in problems("hardware=h200_x1", on=machine(gpus=1, memory_gib=141))[0]


def test_a_launcher_may_show_each_rank_one_gpu():
    place = Joined(rank=3, world_size=8, local_rank=3, local_world_size=8, address="node0", port=29500)
    on = dataclasses.replace(machine(gpus=1), joined=place)
    assert problems("stage=sft", "hardware=a100_80g_x8", on=on) == []


def test_more_ranks_than_devices_and_more_processes_than_cores():
    assert "needs 2 GPUs" in problems("hardware.devices=2", on=machine(gpus=1))[0]
    assert problems("hardware=cpu", "hardware.devices=8") == []


def test_several_nodes_need_a_meeting_place_and_a_folder():
    two = ("stage=sft", "hardware=cpu", "hardware.nodes=2")
    refused = 0
    for rendezvous, folder_given in product(("null", "node0:29500"), (True, False)):
        found = problems(*two, f"hardware.rendezvous={rendezvous}", folder_given=folder_given)
        assert len(found) == (rendezvous == "null") + (not folder_given)
        refused += bool(found)
    assert refused == 3
    assert "host:port" in problems(*two, "hardware.rendezvous=node0")[0]


def test_lora_targets_that_match_nothing():
    (sentence,) = problems("lora=qkv", "lora.targets=[query_key_value]")
    assert "query_key_value" in sentence and "q_proj, k_proj, v_proj" in sentence
    assert problems("lora=off", "lora.targets=[query_key_value]") == []
    shapes = 0
    base = plain(composed("stage=sft"))
    for model, targets in product(options("model"), ("qkv", "all")):
        shapes += 1
        assert refusals(with_option(with_option(base, "model", model), "lora", targets), training=False) == []
    assert shapes >= 60


def test_lengths_over_the_models_limit():
    (sentence,) = problems("model=tiny", "data.max_prompt_length=500", "data.max_answer_length=48")
    assert "is 548 tokens, and model=tiny takes 512; write data.max_prompt_length=464 or less" in sentence
    assert problems("model=tiny", "data.max_prompt_length=464", "data.max_answer_length=48") == []


def test_a_model_needs_weights_from_one_place():
    refused = []
    grid = list(product(("null", "some/model"), ("null", "yaml"), ("false", "true")))
    for path, package, random_init in grid:
        found = problems(
            "model=tiny", f"model.path={path}", f"model.package={package}", f"model.random_init={random_init}"
        )
        assert len(found) <= 1
        refused += [(path, package, random_init)] if found else []
    none, two = ("null", "null", "false"), {("some/model", "yaml", "false"), ("null", "yaml", "true")}
    assert len(grid) == 8 and set(refused) == {none, *two, ("some/model", "yaml", "true")}
    assert "pip install not-there" in problems("model.package=not_there")[0]
    assert "needs a shape" in problems("model=tiny", "model.shape=null")[0]


def test_every_stage_needs_its_data():
    needs = {"sft": ["sft"], "rm": ["preferences"], "ppo": ["prompts"], "all": ["sft", "preferences", "prompts"]}
    refused = 0
    for stage, source in product(needs, ("sft", "preferences", "prompts")):
        found = problems(f"stage={stage}", "reward=function", f"data.{source}=null")
        assert bool(found) == (source in needs[stage])
        refused += bool(found)
    assert refused == 6
    assert "ptx_coefficient=1" in problems("reward=function", "stage.ptx_coefficient=1", "data.sft=null")[0]
    assert "nowhere.jsonl does not exist" in problems("stage=sft", "data.sft=nowhere.jsonl")[0]


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("rlhf.rewards.courtesy", None),
        ("rlhf.rewards.curtesy", "did you mean rlhf.rewards.courtesy?"),
        ("rlhf.reward.courtesy", "module rlhf.reward, which cannot be found"),
        ("courtesy", "not a dotted path"),
        ("not_there.at.all", "module not_there.at, which cannot be found"),
        ("json.dumps", None),
        ("math.sqrt", None),
    ],
)
def test_reward_functions_are_looked_up_without_importing(function, part):
    found = problems("reward=function", f"reward.function={function}")
    assert (part is None) == (found == [])
    assert part is None or part in found[0]


def test_a_reward_function_beside_the_user(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')\ndef score(prompts, answers): ...\n")
    cfg = composed("reward=function", "reward.function=mine.score", "data.prompts=p.jsonl", "data.prompts_heldout=null")
    (tmp_path / "p.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    assert parse(cfg, machine=CPU).reward.function == "mine.score"


def test_reward_models_that_are_not_there():
    assert "reward.path=outputs/not/there does not exist" in problems("reward.path=outputs/not/there")[0]
    assert problems("reward.path=owner/name") == []  # may be on the hub
    assert "stage=all trains its own" in problems("stage=all", "reward.path=conf")[0]
    assert "needs a function" in problems("reward=function", "reward.function=null")[0]
    assert "stage.rm to train one" in problems("stage.rm=null")[0]


def _tokenizer(folder, vocabulary, **other):
    folder.mkdir()
    content = {"model": {"vocab": {word: index for index, word in enumerate(vocabulary)}}, "added_tokens": []} | other
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_mixed_tokenizers(tmp_path):
    ours = _tokenizer(tmp_path / "ours", "abc")
    cases = {
        None: _tokenizer(tmp_path / "same", "abc", padding={"length": 8}),
        "vocabularies of 3 and 4 tokens": _tokenizer(tmp_path / "more", "abcd"),
        "other tokens or merges": _tokenizer(tmp_path / "order", "acb"),
        "other normalisation": _tokenizer(tmp_path / "lower", "abc", normalizer={"type": "Lowercase"}),
        "other special tokens": _tokenizer(tmp_path / "added", "abc", added_tokens=[{"id": 3, "content": "<end>"}]),
    }
    for difference, theirs in cases.items():
        found = problems("model=tiny", "model.random_init=false", f"model.path={ours}", f"reward.path={theirs}")
        if difference is None:
            assert found == []
        else:
            assert difference in found[0] and str(ours) in found[0] and str(theirs) in found[0]
    assert len(cases) == 5


def test_a_warm_up_longer_than_training_is_a_warning():
    def warnings(*overrides: str) -> tuple[str, ...]:
        return parsed("reward=function", "stage.steps=10", "stage.ppo_epochs=2", *overrides).warnings

    assert warnings("stage.warmup_steps=20") == ()
    (sentence,) = warnings("stage.warmup_steps=21")
    assert "more than the 20 optimizer steps" in sentence and "write e.g. stage.warmup_steps=2" in sentence


def test_every_rule_runs_on_a_whole_configuration(monkeypatch):
    ran = []

    def watched(rule):
        def call(**groups):
            ran.append(rule.__name__)
            return list(rule(**groups))

        return functools.update_wrapper(call, rule)  # its parameters too

    monkeypatch.setattr(rules, "RULES", tuple(watched(rule) for rule in rules.RULES))
    assert problems("stage=ppo") == []
    assert set(ran) == {
        "rollout_batch", "adaptive_kl", "bf16", "fp16", "offload", "named_hardware_is_here", "launcher", "nodes",
        "model_source", "model_shape", "lora_targets", "lengths", "data_sources", "reward_source", "tokenizers",
    }  # fmt: skip
    assert ran.count("data_sources") == 2  # rm, then ppo
