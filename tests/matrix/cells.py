"""Many tiny runs in one process: `python -m tests.matrix.cells <jobs.json>`, as one rank or as each of several.

Importing torch and DeepSpeed costs many times what a tiny run does. Each job is a folder with its config.yaml; the
worker runs it as in production. Beside its files a run leaves what its engines answered at its end: probe.safetensors.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf import failures, files
from rlhf.config import Config, parse, to_yaml
from tests.configs import CONF, CPU, ROOT, composed, plain, with_option

SETTINGS = (
    "model=tiny",
    "hardware=cpu",
    "wandb.mode=disabled",
    "hydra.run.dir=unused",
    "data.use_chat_template=false",
    "data.system=null",
    "data.max_prompt_length=10",
    "data.max_answer_length=12",
    "data.heldout_fraction=0.1",
)
SUPERVISED = ("stage.warmup_steps=0", "stage.learning_rate=5e-3", "stage.total_batch=8", "stage.micro_batch=2")
# Advantages are not whitened: the mean of whitened ones, the first loss, is 0 up to rounding.
PPO = (
    "stage.rm=null",
    "stage.rollout_batch=8",
    "stage.rollout_micro_batch=2",
    "data.max_answer_length=6",
    "stage.critic_learning_rate=5e-3",
    "stage.whiten_advantages=false",
    "stage.sample_every=0",
)


def write_data(folder: Path, rows: int = 48) -> dict[str, str]:
    """Tiny data sets: chosen answers are full of a, rejected ones of b. Returns the data.* settings that name them."""
    rng = random.Random(0)

    def text(letters: str) -> str:
        return "".join(rng.choice(letters) for _ in range(rng.randint(4, 10)))

    tables = {
        "sft": [{"prompt": text("xyz "), "answer": text("abc")} for _ in range(rows)],
        "preferences": [{"prompt": text("xyz "), "chosen": text("aac"), "rejected": text("bbc")} for _ in range(rows)],
        "prompts": [{"prompt": text("xyz")} for _ in range(rows)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, str] = {}
    for kind, table in tables.items():
        for name, part in ((kind, table[: -rows // 6]), (f"{kind}_heldout", table[-rows // 6 :])):
            file = folder / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in part))
            named[name] = str(file)
    return named | {"cache": str(folder / "cache")}


def write_models(folder: Path) -> dict[str, str]:
    """A base model and a reward model with random weights, as plain transformers folders; returns where they are."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf.config import ModelShape
    from rlhf.models.families import config_arguments
    from rlhf.models.tiny_tokenizer import build_tiny_tokenizer

    shape = ModelShape(**plain(OmegaConf.load(CONF / "model" / "tiny.yaml"))["shape"])
    tokenizer = build_tiny_tokenizer(shape.vocabulary)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(shape.family, **config_arguments(shape) | ends)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        policy = AutoModelForCausalLM.from_config(config)
        config.num_labels = 1
        reward = AutoModelForSequenceClassification.from_config(config)
    for name, model in (("base", policy), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {"base": str(folder / "base"), "reward": str(folder / "reward")}


def base(stage: str, *overrides: str) -> dict[str, Any]:
    """The composed settings of a stage; cells change groups and keys of it without composing again."""
    own = (*SUPERVISED, *(PPO if stage == "ppo" else ()))
    return plain(composed(f"stage={stage}", *SETTINGS, *own, "stage.steps=3", *overrides))


def configured(cfg: dict[str, Any], groups: dict[str, str] | None = None, **keys: Any) -> Config:
    """`cfg` with other options of groups, and with keys given as stage__micro_batch=4."""
    for group, option in (groups or {}).items():
        cfg = with_option(cfg, group, option)
    changed = OmegaConf.create(cfg)
    for key, value in keys.items():
        OmegaConf.update(changed, key.replace("__", "."), value, force_add=True)
    return parse(changed, machine=CPU)


@dataclass
class Cell:
    """A run to do. `framework` is dschat, or plain for the reference."""

    folder: Path
    config: Config
    framework: str = "dschat"

    @property
    def result(self) -> dict[str, Any]:
        found = files.read_json(self.folder / "result.json")
        assert found is not None, f"{self.folder.name} left no result.json: {failures.errors(self.folder)}"
        return found

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def first_update(self) -> dict[str, float]:
        return next(row for row in self.rows() if any(key.startswith("grad_norm") for key in row))

    def probe(self):
        from safetensors.torch import load_file

        return load_file(self.folder / "probe.safetensors")


def run(cells: list[Cell], ranks: int = 1, timeout: float = 280) -> None:
    """Runs them one after the other in one group of `ranks` processes. A cell that fails says so in its result.json."""
    if not cells:
        return
    for cell in cells:
        failures.clear(cell.folder)
        files.write_text(cell.folder / "config.yaml", to_yaml(cell.config))
    jobs = cells[0].folder / "jobs.json"
    files.write_json(jobs, {"jobs": [[str(cell.folder), cell.framework] for cell in cells]})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    logs = [jobs.with_name(f"rank_{rank}.log") for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as opened:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.matrix.cells", str(jobs)],
                    cwd=ROOT,
                    env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=opened,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)


def main(jobs: Path) -> None:
    import torch

    from rlhf import frameworks, worker
    from rlhf.metrics import Recorder
    from tests.frameworks.plain import Plain

    torch.set_num_threads(1)
    Recorder._draw = lambda self: []  # tests/test_plots.py draws; here it would be most of the time
    dschat = frameworks.load
    for folder, framework in json.loads(jobs.read_text())["jobs"]:
        engines: dict[str, Any] = {}

        def load(config, device, framework=framework, engines=engines):
            loaded = Plain(config, device) if framework == "plain" else dschat(config, device)
            return keeping_engines(loaded, engines)

        frameworks.load = load
        try:
            worker.main(folder)
        except SystemExit as leaving:
            print(f"{folder} left with {leaving.code}", flush=True)
            if int(os.environ["WORLD_SIZE"]) > 1:
                raise  # the other ranks may be inside a collective
            continue
        answer_probe(Path(folder), engines)
    # gloo's threads and DeepSpeed's hooks have nothing to save
    sys.stdout.flush()
    os._exit(0)


def keeping_engines(framework, engines: dict[str, Any]):
    original = framework.trainable

    def trainable(model, settings, role):
        engines[role] = original(model, settings, role)
        return engines[role]

    framework.trainable = trainable
    return framework


def probe_inputs():
    """Four sequences with padding on both sides, (4, 16)."""
    import torch

    tokens = torch.randint(5, 261, (4, 16), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, :5], mask[2, 12:], mask[3, :2] = 0, 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def answer_probe(folder: Path, engines: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    answers = {}
    for role, engine in engines.items():
        with torch.no_grad():
            output = engine(**probe_inputs())
        answers[role] = (output[0] if isinstance(output, tuple) else output).float().contiguous()
    if os.environ["RANK"] == "0":
        save_file(answers, folder / "probe.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
