"""What a traced rollout leaves, and which rollouts are traced."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import trl_trainer
import wandb

from rollout import ConfigError, RolloutConfig, RolloutEngine, SamplingParams, timeline
from rollout.trace import tracing
from trainers import traces
from trainers.pictures import draw_lengths, draw_progress

PNG = b"\x89PNG"


@pytest.mark.parametrize("value", ["on", "", "every:0", "every:", "every:-1", "every:2x", None, 3])
def test_what_is_traced_is_off_last_or_every(value):
    with pytest.raises(ConfigError, match=f"trace={value!r}: it must be 'off', 'last' or 'every:N"):
        RolloutConfig(trace=value)
    found = [RolloutConfig(trace=trace).trace_period for trace in ("off", "last", "every:12")]
    assert found == [0, 0, 12]


@pytest.mark.parametrize(
    ("trace", "steps"), [("off", []), ("last", [5]), ("every:2", [1, 3, 5]), ("every:9", [1])]
)
def test_the_rollouts_asked_for_leave_files(tmp_path, monkeypatch, trace, steps):
    traced = []

    def counting(engine):
        traced.append(engine)
        return tracing(engine)

    monkeypatch.setattr(traces, "tracing", counting)
    options = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 5}
    trainer = trl_trainer.build(tmp_path, **options)
    trainer.eval_dataset = trainer.eval_dataset.select(range(2))
    trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace=trace))
    trainer.train()
    assert len(traced) == (5 if trace == "last" else len(steps))
    found = sorted(path.name for path in tmp_path.glob("rollouts/*"))
    endings = ("-lengths.png", "-progress.png", "-timeline.png", ".json")
    assert found == [f"step-{step:06}{ending}" for step in steps for ending in endings]
    for path in tmp_path.glob("rollouts/*.png"):
        assert path.read_bytes().startswith(PNG)
    for path in tmp_path.glob("rollouts/*.json"):
        assert {e["ph"] for e in json.loads(path.read_text())["traceEvents"]} == {"M", "X"}


def test_a_picture_that_fails_is_warned_of_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no ink")

    monkeypatch.setattr(traces, "draw_lengths", broken)
    trainer = trl_trainer.build(tmp_path, max_steps=2)
    trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="every:2"))
    trainer.train()
    assert trainer.state.global_step == 2
    assert "the trace of step 1 could not be written: no ink" in caplog.text


def test_a_trace_is_every_batch_in_microseconds():
    with RolloutEngine(tiny.build(), RolloutConfig(max_rows=3, page_tokens=4)) as engine:
        with tracing(engine) as found:
            engine.generate(tiny.prompts(5), SamplingParams(max_new_tokens=6))
        steps, decoded = engine.stats.engine_steps, engine.stats.decoded_rows
    events = timeline.chrome_trace(found)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == list(timeline.TRACKS)
    batches = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert len(batches) == steps
    assert sum(event["args"]["rows"] for event in batches) == decoded
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    ends = max(event["ts"] + event["dur"] for event in batches) / 1e6
    assert ends == pytest.approx(found.span_s("compute"), rel=0.2)
    assert timeline.chrome_trace(timeline.Timeline())["traceEvents"][-1]["ph"] == "M"


def test_one_batch_and_one_completion_are_drawn_too(tmp_path):
    batch = timeline.Interval("compute", "decode", 1.0, 1.5, 3)
    draw_progress(timeline.Timeline([batch]), tmp_path / "progress.png")
    draw_lengths([1], tmp_path / "lengths.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(PNG)


def test_pictures_that_could_not_be_drawn_are_refused_at_once(tmp_path, monkeypatch):
    trainer = trl_trainer.build(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="last"))
    assert not trainer.use_vllm
    trl_trainer.attach(trainer)


def test_detaching_leaves_what_was_recorded_and_no_callback(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    before = list(trainer.callback_handler.callbacks)
    generator = trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="last"))
    trainer._generate(["xyz"] * 4)
    assert list(tmp_path.glob("rollouts/*")) == []
    generator.detach()
    assert len(list(tmp_path.glob("rollouts/*"))) == 4
    assert trainer.callback_handler.callbacks == before


def test_pictures_go_to_the_trainers_run_with_its_step(tmp_path, monkeypatch):
    sent = []
    run = SimpleNamespace(log=lambda data, commit: sent.append((data, commit)))
    trainer = trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="last"))
    trainer._generate(["xyz"] * 4)
    monkeypatch.setattr(wandb, "run", run)
    monkeypatch.setattr(wandb, "Image", lambda path: path)
    trainer.args.report_to = ["wandb"]
    generator.detach()
    ((data, commit),) = sent
    assert data.pop("train/global_step") == 1
    assert not commit
    stem = tmp_path / "rollouts" / "step-000001"
    names = ("timeline", "progress", "lengths")
    assert data == {f"train/rollout/{name}": f"{stem}-{name}.png" for name in names}
