"""What training prints on the terminal about rollouts."""

import logging
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import trl_trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import trainers.reporting.progress
from rollout import EngineConfig, RolloutEngine, SamplingParams
from trainers.reporting.progress import progress, shows_progress


class Terminal:
    """A standard error stream that is or is not a terminal."""

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
    engine = SimpleNamespace(observing=lambda observer: nullcontext(told.append(observer)))
    told = []
    with progress(engine, 12, max_new_tokens=50):
        # Seconds, steps and their rows since the previous state; live and waiting rows.
        for state in [(2, 10, 60, 7, 3), (4, 10, 60, 6, 0), (8, 20, 40, 5, 0)]:
            now[0], num_steps, num_rows, engine.num_live, engine.num_waiting = state
            for _ in range(num_steps):
                told[0].launched(SimpleNamespace(rows=range(num_rows)), 0)
            told[0].settled(None, [], None)
    shown = [line for line in screen.text.split("\r") if "tok/s" in line]
    assert "7 live, 300 tok/s]" in shown[0]
    assert "6 live, 300 tok/s, at most 00:08 to the end]" in shown[1]  # 41 steps of 0.2 s
    assert "5 live, 250 tok/s, at most 00:04 to the end]" in shown[2]  # 21 steps


def test_the_bar_counts_rows_and_knows_its_tail(monkeypatch):
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(trainers.reporting.progress, "_PERIOD_S", 0)
    sampling = [SamplingParams(max_new_tokens=5 + 4 * i) for i in range(6)]
    config = EngineConfig(max_rows=3, page_tokens=4)
    with RolloutEngine(tiny.build(), config) as engine, progress(engine, 6, 25):
        engine.generate(tiny.prompts(6), sampling)
    shown = [line for line in screen.text.split("\r") if "tok/s" in line]
    first = next(line for line in shown if "1/6" in line)
    assert " live" in first
    assert "to the end" not in first  # unknown while rows wait
    assert "6/6" in shown[-1]
    assert "0 live" in shown[-1]
    assert "at most 00:0" in shown[-1]
    assert screen.text.endswith("\r")  # the bar is cleared


def test_a_training_draws_it_where_it_draws_its_own(tmp_path, monkeypatch):
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    trainer = trl_trainer.build(tmp_path, max_steps=1, disable_tqdm=False)
    trl_trainer.attach(trainer)
    trainer.train()
    assert "rollout: 100%" in screen.text
    assert "8/8" in screen.text


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_a_terminal_shows_one_line_a_rollout_and_none_of_its_metrics(
    tmp_path, capsys, caplog, disable_tqdm
):
    trainer = trl_trainer.build(tmp_path, max_steps=2, disable_tqdm=disable_tqdm)
    if disable_tqdm:
        trainer.add_callback(PrinterCallback)  # TRL's, which `build` has removed
    generator = trl_trainer.attach(trainer)
    trainer.train()
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("rollout: 8 rows, ")]
    assert len(lines) == 2
    for line in lines:
        assert "tok/s; mean length" in line
        assert "compute" in line
    logged = [line for line in printed if "'reward'" in line]
    assert len(logged) == 2
    assert not [line for line in printed if "rollout/" in line]
    assert len(trl_trainer.logged(trainer, "rollout/time/compute")) == 2
    ours = [r for r in caplog.records if r.name.split(".")[0] in ("rollout", "trainers")]
    assert not [record for record in ours if record.levelno >= logging.WARNING]
    generator.detach()
    trainer.log({"rollout/left": 1.0})
    assert disable_tqdm is (
        "rollout/left" in capsys.readouterr().out
    )  # a closed bar prints nothing


def test_a_callback_of_the_users_own_shows_what_it_likes(tmp_path, capsys):
    shown = []

    class Own(ProgressCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            shown.extend(name for name in logs if name.startswith("rollout/length"))

    trainer = trl_trainer.build(tmp_path, max_steps=1)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Own())
    trl_trainer.attach(trainer)
    trainer.train()
    assert "rollout/length/mean" in shown
    assert "rollout: " not in capsys.readouterr().out
