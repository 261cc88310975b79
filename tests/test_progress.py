"""Progress: a log gets a line now and then, a terminal a live one, other ranks nothing."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

import rlhf.progress
from rlhf.progress import Progress

GIB = 2**30


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rlhf.progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


def shown(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_a_log_gets_a_line_every_ten_seconds_and_one_at_the_end(clock):
    log = console(terminal=False)
    with Progress("ppo", 10, 0, log) as progress:
        for step in range(4, 8):  # a resumed run: the rate must not count the steps it never did
            clock.now += 4
            progress.advance(step, {"reward": step / 8, "kl": 0.01}, memory_bytes=(10 - step) * GIB)
        progress.note("held-out reward 1.25 [before -0.5]")
    assert shown(log).splitlines() == [
        "ppo 6/10  4.0 s/step  0:00:16 left  4.00 GiB (peak 6.00)  reward 0.75  kl 0.01",
        "held-out reward 1.25 [before -0.5]",
        "ppo 7/10  4.0 s/step  0:00:12 left  3.00 GiB (peak 6.00)  reward 0.875  kl 0.01",
    ]


def test_the_last_line_is_not_printed_twice(clock):
    log = console(terminal=False)
    with Progress("sft", 2, 0, log) as progress:
        for step in (1, 2):
            clock.now += 20
            progress.advance(step, {"loss": 1.0}, GIB)
    assert [line.split()[1] for line in shown(log).splitlines()] == ["1/2", "2/2"]


def test_a_fast_stage_is_told_in_steps_per_second(clock):
    log = console(terminal=False)
    with Progress("sft", 100, 0, log) as progress:
        for step in range(1, 51):
            clock.now += 0.125
            progress.advance(step, {}, GIB)
    assert "8.00 steps/s  0:00:06 left" in shown(log)


def test_a_terminal_gets_a_live_line():
    terminal = console(terminal=True)
    with Progress("rm", 3, 0, terminal) as progress:
        for step in (1, 2, 3):
            progress.advance(step, {"accuracy": 0.5}, GIB)
    assert "3/3" in shown(terminal) and "accuracy 0.5" in shown(terminal) and "━" in shown(terminal)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_other_ranks_show_nothing(is_terminal):
    target = console(is_terminal)
    with Progress("rm", 3, 1, target) as progress:
        progress.advance(1, {"accuracy": 0.5}, GIB)
        progress.note("hello")
    assert shown(target) == ""
