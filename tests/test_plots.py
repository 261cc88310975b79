"""Pictures come from the JSON lines alone, whatever is there yet. What they show is read off matplotlib's objects."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.figure import Figure
from PIL import Image

from rlhf.plots import draw

GIB = 2**30


def write(folder: Path, name: str, rows: list[dict], torn: str = "") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def peak(phase: str, role: str, allocated: float, reserved: float, device: float, **fields) -> dict:
    sizes = {"allocated_bytes": allocated, "reserved_bytes": reserved, "device_bytes": device}
    return {"step": 1, "rank": 0, "phase": phase, "role": role} | {k: int(v * GIB) for k, v in sizes.items()} | fields


def ppo_rows(steps: int) -> list[dict]:
    rows: list[dict] = [{"step": 0, "reward/heldout_mean": -1.0, "reward/heldout_std": 0.5}]
    for step in range(1, steps + 1):
        rows.append({
            "step": step, "reward/mean": float(step), "reward/std": 0.25, "kl/signed": -0.1, "kl/nonnegative": 0.2,
            "kl/coefficient": 0.1, "loss/actor": 0.0, "loss/critic": 1.0 / step,
        })  # fmt: skip
    return [*rows, {"step": steps, "event": "early_stop", "reason": "KL"}]


@pytest.fixture
def figures(monkeypatch) -> dict[str, Figure]:
    """Every figure that is written, by the name of its file."""
    seen = {}
    save = Figure.savefig

    def savefig(self, path, **options):
        seen[path.stem] = self
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


def test_a_ppo_run_has_all_five_pictures_at_the_size_of_a_readme(tmp_path, figures):
    write(tmp_path, "metrics.jsonl", ppo_rows(5))
    write(tmp_path, "timing.jsonl", [{"step": 1, "seconds": 2.0, "tokens_per_second": 10.0}])
    write(tmp_path, "memory.jsonl", [peak("update", "actor", 1, 2, 3)])
    names = {"framework": "dschat", "stage": "ppo", "model": "tiny"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({group: {"name": name} for group, name in names.items()}))
    written = draw(tmp_path)
    assert [path.name for path in written] == ["reward.png", "kl.png", "loss.png", "memory.png", "throughput.png"]
    for path in written:
        with Image.open(path) as image:
            assert image.size == (900, 500)
            assert np.asarray(image.convert("L")).std() > 1, f"{path.name} is blank"
        assert figures[path.stem].get_suptitle().endswith(", framework dschat, stage ppo, model tiny")
        assert all(axes.get_xlabel() for axes in figures[path.stem].axes)
    assert [axes.get_ylabel() for axes in figures["loss"].axes] == ["actor loss", "critic loss"]
    assert [axes.get_ylabel() for axes in figures["throughput"].axes] == ["tokens per second", "seconds per step"]


def test_the_reward_shows_mean_band_and_heldout_points(tmp_path, figures):
    write(tmp_path, "metrics.jsonl", ppo_rows(4))
    draw(tmp_path)
    (axes,) = figures["reward"].axes
    curve, heldout, *_ = axes.get_lines()
    assert curve.get_xydata().tolist() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert heldout.get_xydata().tolist() == [[0, -1]]
    (band,) = [item for item in axes.collections if isinstance(item, FillBetweenPolyCollection)]
    corners = np.asarray(band.get_paths()[0].vertices)
    assert corners[corners[:, 0] == 2, 1].min() == 1.75 and corners[corners[:, 0] == 2, 1].max() == 2.25


def test_the_coefficient_is_shown_only_when_it_changes(tmp_path, figures):
    rows = ppo_rows(3)
    write(tmp_path, "metrics.jsonl", rows)
    draw(tmp_path)
    assert [axes.get_ylabel() for axes in figures["kl"].axes] == ["KL (nats)"]
    rows[1]["kl/coefficient"] = 0.2
    write(tmp_path, "metrics.jsonl", rows)
    draw(tmp_path)
    assert [axes.get_ylabel() for axes in figures["kl"].axes] == ["KL (nats)", "KL coefficient"]


def test_memory_is_the_highest_over_steps_and_ranks_from_zero(tmp_path, figures):
    write(tmp_path, "memory.jsonl", [peak("generate", "actor", 1, 2, 3), peak("generate", "actor", 2, 3, 3.5, step=2)])
    write(tmp_path, "ranks/memory_1.jsonl", [peak("generate", "actor", 1, 4, 5, rank=1), peak("-", "-", 0.5, 1, 1.5)])
    draw(tmp_path)
    (axes,) = figures["memory"].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["generate · actor", "between phases"]
    bars = {container.get_label(): [bar.get_width() for bar in container] for container in axes.containers}
    assert bars == {"device used": [5, 1.5], "reserved by torch": [4, 1], "allocated by torch": [2, 0.5]}
    assert axes.get_xlim()[0] == 0 and "GiB" in axes.get_xlabel()
    assert [text.get_text() for text in axes.texts] == ["5.00", "1.50"]


def test_on_cpu_the_three_are_one_bar(tmp_path, figures):
    write(tmp_path, "memory.jsonl", [peak("update", "actor", 2, 2, 2), peak("load", "-", 1, 1, 1)])
    draw(tmp_path)
    (bars,) = figures["memory"].axes[0].containers
    assert [bar.get_width() for bar in bars] == [2, 1] and bars.get_label().startswith("resident memory")


def test_a_run_that_is_being_written_is_drawn_as_far_as_it_goes(tmp_path):
    assert draw(tmp_path) == []
    assert not (tmp_path / "plots").exists()
    write(tmp_path, "metrics.jsonl", [{"step": 1, "loss": 2.0}], torn='{"step": 2, "lo')
    assert [path.name for path in draw(tmp_path)] == ["loss.png"]


def test_a_number_that_is_not_finite_leaves_a_gap(tmp_path, figures):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": "inf"}, {"step": 4, "loss": 1.0}]
    write(tmp_path, "metrics.jsonl", rows)
    draw(tmp_path)
    np.testing.assert_equal(figures["loss"].axes[0].get_lines()[0].get_ydata(), [2.0, np.nan, np.nan, 1.0])


def test_a_reward_model_shows_both_answers_and_the_accuracy(tmp_path, figures):
    row = {"step": 1, "reward/chosen": 1.0, "reward/rejected": -1.0, "accuracy": 0.75, "heldout/accuracy": 0.5}
    write(tmp_path, "metrics.jsonl", [row])
    draw(tmp_path)
    scores, accuracy = figures["reward"].axes
    assert [line.get_ydata()[0] for line in scores.get_lines()] == [1.0, -1.0]
    assert [line.get_ydata()[0] for line in accuracy.get_lines()] == [0.75, 0.5]


def test_a_long_curve_gets_its_moving_average(tmp_path, figures):
    write(tmp_path, "metrics.jsonl", [{"step": step, "loss": float(step % 2)} for step in range(1, 401)])
    draw(tmp_path)
    raw, average = figures["loss"].axes[0].get_lines()
    assert set(raw.get_ydata()) == {0.0, 1.0}
    assert average.get_ydata()[0] == 1.0 and set(average.get_ydata()[8::8]) <= {0.5}
    assert figures["loss"].axes[0].get_xlabel() == "step (bold: average of 8)"
