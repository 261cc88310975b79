"""python train.py as users type it. Every process here ends before torch: it is refused, or only shows something."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

from rlhf import command_line, run_folder
from rlhf.config import ConfigError
from rlhf.hydra_choices import option_name
from rlhf.joined import Joined
from rlhf.sweep import read_cell, read_cells, rows
from tests.configs import CONF, ROOT, composed

REFUSED_HERE = "hardware=a100_80g_x64"  # eight nodes, and nothing says where they meet


def train(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(command, cwd=folder, env=env | environment, capture_output=True, text=True)


@pytest.mark.parametrize("zero", ["0", "1", "2", "3"])
def test_numbers_choose_options_on_the_command_line(zero):
    assert composed(f"zero={zero}").zero.zero_stage == int(zero)


@pytest.fixture
def experiments(tmp_path):
    """A folder beside conf/ with an experiment that writes its choices as YAML users do."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        textwrap.dedent(
            """\
            # @package _global_
            defaults:
              - override /zero: 3
              - override /lora: off
              - override /stage: sft
            experiment: mine
            stage:
              total_batch: 16
            """
        )
    )
    return tmp_path


def test_numbers_and_truth_values_choose_options_in_experiments(experiments):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", ["experiment=mine", f"hydra.searchpath=[file://{experiments}]"])
    assert (cfg.zero.zero_stage, cfg.lora.enabled, cfg.stage.name) == (3, False, "sft")
    assert (cfg.stage.total_batch, cfg.experiment) == (16, "mine")
    with initialize_config_dir(str(CONF), version_base="1.3"):  # the command line still wins
        cfg = compose("train", ["experiment=mine", "zero=1", f"hydra.searchpath=[file://{experiments}]"])
    assert cfg.zero.zero_stage == 1


def test_option_names():
    class Options:
        def get_group_options(self, group: str) -> list[str]:
            return {"lora": ["all", "off", "qkv"], "zero": ["0", "1"], "other": ["false", "on"]}[group]

    name = lambda group, choice: option_name(Options(), group, choice)  # type: ignore[arg-type]  # noqa: E731
    assert (name("zero", 1), name("zero", 7), name("zero", True)) == ("1", "7", "true")
    assert (name("lora", False), name("lora", "off"), name("lora", None)) == ("off", "off", None)
    assert (name("other", False), name("other", True), name("zero", [0, "1"])) == ("false", "on", ["0", "1"])


def test_cfg_job_shows_the_configuration_and_makes_no_folder(tmp_path):
    shown = train("--cfg", "job", "zero=3", "stage=all", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    cfg = yaml.safe_load(shown.stdout)
    assert cfg["zero"]["zero_stage"] == 3 and cfg["stage"]["ppo"]["rm"] is None
    assert list(tmp_path.iterdir()) == []


RUN_AND_LIST_MODULES = """\
import runpy, sys
script = sys.argv[1]
del sys.argv[0]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    print(end.code, "rlhf.rules" in sys.modules, "torch" in sys.modules)
"""


def test_a_refusal_comes_before_torch(tmp_path):
    command = [sys.executable, "-c", RUN_AND_LIST_MODULES, str(ROOT / "train.py"), REFUSED_HERE, "lora=qkv"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "2 True False", done.stderr


def test_help_lists_groups_and_examples():
    shown = train("--help")
    assert shown.returncode == 0, shown.stderr
    for line in ("zero: 0, 1, 2, 3", "lora: all, off, qkv", "stage: all, ppo, rm, sft", "-m zero=0,1,2,3 lora=off,qkv"):
        assert line in shown.stdout
    assert 'eval "$(python train.py -sc install=bash)"' in shown.stdout


def test_info_defaults():
    shown = train("--info", "defaults", "zero=3")
    assert shown.returncode == 0 and "zero/3" in shown.stdout and "lora/off" in shown.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("zero=", ["zero=0", "zero=1", "zero=2", "zero=3"]),
        ("zero=2 lora=", ["lora=all", "lora=off", "lora=qkv"]),
        ("stage.ppo_ep", ["stage.ppo_epochs="]),
    ],
)
def test_tab_completion(typed, offered):
    line = f"python train.py {typed}"
    done = train("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert done.stdout.split() == offered, done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["zero=5"], "Could not find 'zero/5'"),
        (["lora.rnak=3"], "Key 'rnak' is not in struct"),
        (["zero"], "missing EQUAL"),
        (["lora.rank=-3"], "lora.rank=-3 is not a positive whole number; write e.g. lora.rank=16"),
        (["resume=nowhere"], "resume=nowhere is not the folder of a run"),
        (["resume=true"], "resume=true finds no unfinished run"),
        (["--local_rank=0", "seed=-1"], "seed=-1"),
        (["-m", "zero=1,9"], "Could not find 'zero/9'"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(arguments, part, tmp_path):
    done = train(*arguments, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR" not in done.stderr


def test_all_problems_are_numbered(tmp_path):
    done = train("lora.rank=-3", "seed=-1", "zero.offload_parameters=true", REFUSED_HERE, folder=tmp_path)
    numbers = [line.split(".")[0] for line in done.stderr.splitlines() if line[:1].isdigit()]
    assert done.returncode == 2 and numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert len(numbers) >= 4


def test_hydra_run_dir_is_respected(tmp_path):
    train(REFUSED_HERE, f"hydra.run.dir={tmp_path / 'mine'}", folder=tmp_path)
    assert (tmp_path / "mine" / ".hydra" / "config.yaml").is_file() and not (tmp_path / "outputs").exists()


def test_a_sweep_goes_on_after_refused_cells_and_ends_with_a_table(tmp_path):
    done = train("-m", "zero=0,1,2,3", "lora=off,qkv", REFUSED_HERE, "hydra.sweep.dir=sweep", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    cells = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["refused"] * 8
    choices = {tuple(cell["overrides"][:2]) for cell in cells}
    assert choices == {(f"zero={zero}", f"lora={lora}") for zero in "0123" for lora in ("off", "qkv")}
    assert all("hardware.rendezvous" in cell["error"] for cell in cells)
    assert len((tmp_path / "sweep" / "sweep.md").read_text().splitlines()) == 2 + 8
    assert done.stdout.count("refused") == 8 and "Traceback" not in done.stderr


def test_sweeps_through_submitit(tmp_path):
    done = train(
        "-m", "zero=2,3", REFUSED_HERE, "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep", folder=tmp_path
    )
    assert done.returncode == 1, done.stderr
    cells = read_cells(tmp_path / "sweep")
    assert [(cell.overrides[0], cell.status) for cell in cells] == [("zero=2", "refused"), ("zero=3", "refused")]


def _cell(folder: Path, overrides: list[str], **files: dict) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_the_table_tells_what_each_cell_came_to(tmp_path):
    result = {
        "status": "ok",
        "wall_seconds": 12.4,
        "metrics": {"heldout_loss": 1.23456, "other": 1},
        "memory": {"predicted": None, "measured": {"peak_bytes": 3 * 2**30}},
    }
    failure = {"status": "oom", "metrics": {}, "memory": {}, "error": {"message": "out of memory\nin generate"}}
    _cell(tmp_path / "0", ["zero=0", "stage=sft"], result=result)
    _cell(tmp_path / "2", ["zero=2", "stage=sft"], refused={"problems": ["No.", "Nor this."]})
    _cell(tmp_path / "10", ["zero=3", "stage=sft"])
    _cell(tmp_path / "1", ["zero=1", "stage=sft"], result=failure)
    cells = read_cells(tmp_path)
    assert [cell.status for cell in cells] == ["ok", "oom", "refused", "failed"]
    heads, lines = rows(cells)
    assert heads == ["cell", "overrides", "status", "peak (GiB)", "seconds", "heldout_loss", "error"]
    assert lines[0] == ["0", "zero=0", "ok", "3.00", "12", "1.235", ""]
    assert lines[2][1:3] + lines[2][-1:] == ["zero=2", "refused", "No. Nor this."]
    assert read_cell(tmp_path / "10").error == f"ended without a result; see {tmp_path / '10' / 'ranks'}"


def test_run_folders_are_new_even_within_a_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [run_folder.run_folder(False) for _ in range(20)]
    assert len(set(folders)) == 20 and all(Path(folder).is_dir() for folder in folders)


def test_resume_finds_the_newest_unfinished_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    statuses = {
        "2025-01-01/10-00-00": "failed",
        "2025-01-02/10-00-00": "interrupted",
        "2025-01-02/10-00-00_2": None,
        "2025-01-02/10-00-00_10": None,
        "2025-01-03/10-00-00": "ok",
    }
    for name, status in statuses.items():
        folder = Path("outputs", name)
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
        if status:
            (folder / "result.json").write_text(json.dumps({"status": status}))
    Path("outputs/2025-01-04/10-00-00/.hydra").mkdir(parents=True)  # refused: there is nothing to go on with
    expected = [name for name in reversed(statuses) if statuses[name] != "ok"]
    for name in expected:
        assert run_folder.run_folder(True) == f"outputs/{name}"
        Path("outputs", name, "result.json").write_text('{"status": "ok"}')
    with pytest.raises(ConfigError, match="finds no unfinished run"):
        run_folder.run_folder(True)
    assert run_folder.run_folder("outputs/2025-01-01/10-00-00") == "outputs/2025-01-01/10-00-00"
    with pytest.raises(ConfigError, match="not the folder of a run"):
        run_folder.run_folder("outputs/2025-01-04/10-00-00")


def _place(rank: int) -> Joined:
    return Joined(rank, world_size=2, local_rank=rank, local_world_size=2, address="127.0.0.1", port=29500)


def test_only_the_first_of_a_launchers_ranks_has_a_folder():
    argv = ["train.py", "--local_rank=1", "zero=2", "hydra.run.dir=there"]
    assert command_line.arguments(argv, None) == ["train.py", "zero=2", "hydra.run.dir=there"]
    assert command_line.arguments(argv, _place(0)) == ["train.py", "zero=2", "hydra.run.dir=there"]
    assert command_line.arguments(argv, _place(1)) == ["train.py", "zero=2", *command_line.WITHOUT_OUTPUT]
    with pytest.raises(ConfigError, match="sweep"):
        command_line.arguments(["train.py", "-m", "zero=2,3"], _place(0))


def test_a_launchers_second_rank_writes_and_says_nothing(tmp_path):
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = train("seed=-1", folder=tmp_path, RANK="1", LOCAL_RANK="1", **place)
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (2, "", [])
    done = train("seed=-1", folder=tmp_path, RANK="0", LOCAL_RANK="0", **place)
    assert done.returncode == 2 and "seed=-1" in done.stderr
