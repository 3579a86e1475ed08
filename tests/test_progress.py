"""What a training says on the terminal about its rollouts."""

import logging
import sys
import time
from types import SimpleNamespace

import pytest
import tiny
import trl_trainer

import trainers.reporting.progress
from rollout import EngineConfig, RolloutEngine, SamplingParams
from trainers.reporting.progress import progress, shows_progress


class Terminal:
    """Standard error, which is a terminal or is none."""

    def __init__(self, is_terminal):
        self.text, self._is_terminal = "", is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize(
    ("terminal", "trainers_bar", "main", "shown"),
    [
        (True, True, True, True),
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_it_is_shown_where_somebody_looks(
    tmp_path, monkeypatch, terminal, trainers_bar, main, shown
):
    trainer = trl_trainer.build(tmp_path, disable_tqdm=not trainers_bar)
    monkeypatch.setattr(sys, "stderr", Terminal(terminal))
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", main)
    assert shows_progress(trainer) is shown


@pytest.mark.parametrize(("period_s", "num_shown"), [(0, 40), (100, 1)])
def test_it_is_drawn_now_and_then_and_in_the_end(monkeypatch, period_s, num_shown):
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(trainers.reporting.progress, "_PERIOD_S", period_s)
    with RolloutEngine(tiny.build(), EngineConfig(max_rows=4, page_tokens=4)) as engine:
        sampling = [SamplingParams(max_new_tokens=37 + i) for i in range(4)]
        with progress(engine, 4, 40):
            engine.generate(tiny.prompts(4), sampling)
    shown = [line for line in screen.text.split("\r") if "tok/s" in line]
    assert num_shown <= len(shown) <= num_shown + 2
    assert "4/4" in shown[-1]


def test_the_bar_says_what_the_engine_does(monkeypatch):
    screen, now = Terminal(True), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stats = SimpleNamespace()
    states = [(2, 600, 10, 7, 3), (4, 1200, 20, 6, 0), (8, 2000, 40, 5, 0)]

    def step():
        state = states.pop(0)
        now[0], stats.decoded_rows, stats.decode_steps, *rows = state
        engine.num_live, engine.num_waiting = rows
        return []

    engine = SimpleNamespace(stats=stats, step=step)
    with progress(engine, 12, most_tokens=50):
        for _ in range(3):
            engine.step()
    shown = [line for line in screen.text.split("\r") if "tok/s" in line]
    assert "7 live, 300 tok/s]" in shown[0]
    assert "6 live, 300 tok/s, at most 00:10 to the end]" in shown[1]  # 50 steps of 0.2 s
    assert "5 live, 250 tok/s, at most 00:06 to the end]" in shown[2]  # 30 of them


def test_the_bar_counts_rows_and_knows_its_tail(monkeypatch):
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(trainers.reporting.progress, "_PERIOD_S", 0)
    sampling = [SamplingParams(max_new_tokens=5 + 4 * i) for i in range(6)]
    with RolloutEngine(tiny.build(), EngineConfig(max_rows=3, page_tokens=4)) as engine:
        with progress(engine, 6, 25):
            engine.generate(tiny.prompts(6), sampling)
        assert "step" not in vars(engine)
    shown = [line for line in screen.text.split("\r") if "tok/s" in line]
    first = next(line for line in shown if "1/6" in line)
    assert " live" in first
    assert "to the end" not in first  # rows wait, so nobody knows
    assert "6/6" in shown[-1]
    assert "0 live" in shown[-1]
    assert "at most 00:0" in shown[-1]
    assert screen.text.endswith("\r")  # and is cleared


def test_a_training_draws_it_where_it_draws_its_own(tmp_path, monkeypatch):
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    trainer = trl_trainer.build(tmp_path, max_steps=1, disable_tqdm=False)
    trl_trainer.attach(trainer)
    trainer.train()
    assert "rollout: 100%" in screen.text
    assert "8/8" in screen.text


def test_a_healthy_training_says_one_line_a_rollout_and_warns_of_nothing(tmp_path, caplog):
    trainer = trl_trainer.build(tmp_path, max_steps=2)
    with caplog.at_level(logging.INFO):
        trl_trainer.attach(trainer)
        trainer.train()
    ours = [r for r in caplog.records if r.name.split(".")[0] in ("rollout", "trainers")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]
    lines = [record.getMessage() for record in ours if record.name == "trainers.reporting.reporter"]
    assert len(lines) == 2
    for version, line in enumerate(lines, start=1):
        assert line.startswith(f"rollout of 8 rows under policy version {version}: ")
        assert "tok/s" in line
        assert "compute" in line
        assert "\n" not in line


def test_other_ranks_say_nothing(tmp_path, monkeypatch, caplog):
    trainer = trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer)
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", False)
    with caplog.at_level(logging.INFO):
        trainer._generate(["xyz"] * 4)
    generator.detach()
    assert not [record for record in caplog.records if record.name == "trainers.reporting.reporter"]
