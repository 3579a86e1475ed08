"""The files of a traced rollout, and which rollouts are traced."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import trl_trainer
import wandb
from matplotlib.colors import to_hex
from trl import TrlParser

from rollout import ConfigError, EngineConfig, RolloutEngine, SamplingParams
from rollout.telemetry import timeline
from rollout.telemetry.trace import Tracer
from trainers import RolloutConfig
from trainers.reporting import traces
from trainers.reporting.traces import draw_lengths, draw_progress

PNG = b"\x89PNG"


@pytest.mark.parametrize("value", ["on", "", "every:0", "every:", "every:-1", "every:2x", None, 3])
def test_what_is_traced_is_off_last_or_every(value):
    with pytest.raises(ConfigError, match=f"trace={value!r}: must be 'off', 'last' or 'every:N"):
        RolloutConfig(trace=value)
    found = [RolloutConfig(trace=trace).trace_period for trace in ("off", "last", "every:12")]
    assert found == [0, 0, 12]


def test_an_off_that_yaml_reads_as_false_is_answered_by_its_quotes(tmp_path):
    (tmp_path / "run.yaml").write_text("trace: off\n")
    parser = TrlParser(RolloutConfig)
    with pytest.raises(ConfigError, match=r"trace=False: .*; in YAML write 'off' with quotes"):
        parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("trace", "steps"), [("off", []), ("last", [5]), ("every:2", [1, 3, 5]), ("every:9", [1])]
)
def test_the_rollouts_asked_for_leave_files(tmp_path, monkeypatch, trace, steps):
    traced = []

    def counting(device):
        traced.append(device)
        return Tracer(device)

    monkeypatch.setattr(traces, "Tracer", counting)
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


@pytest.mark.parametrize(("trace", "left"), [("every:2", [1, 3]), ("last", [3])])
def test_of_the_rollouts_of_a_step_the_first_counts(tmp_path, trace, left):
    trainer = trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace=trace))
    for step, num_rows in [(0, 4), (0, 2), (1, 4), (1, 4), (2, 4), (2, 2)]:
        trainer.state.global_step = step
        trainer._generate(["xyz"] * num_rows)
    generator.detach()
    found = {path.name: path.read_text() for path in tmp_path.glob("rollouts/*.json")}
    assert sorted(found) == [f"step-{step:06}.json" for step in left]
    for text in found.values():
        assert max(e["args"].get("rows", 0) for e in json.loads(text)["traceEvents"]) == 4


def test_other_ranks_leave_and_print_nothing(tmp_path, monkeypatch, capsys):
    trainer = trl_trainer.build(tmp_path)
    monkeypatch.setattr(type(trainer.accelerator), "is_main_process", False)
    generator = trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="last"))
    trainer._generate(["xyz"] * 4)
    generator.detach()
    assert not (tmp_path / "rollouts").exists()
    assert "rollout: " not in capsys.readouterr().out


def test_a_picture_that_fails_is_warned_of_and_ends_nothing(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no ink")

    monkeypatch.setattr(traces, "draw_lengths", broken)
    trainer = trl_trainer.build(tmp_path, max_steps=2)
    trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="every:2"))
    trainer.train()
    assert trainer.state.global_step == 2
    assert "trace of step 1 not written; training goes on: no ink" in caplog.text


def test_a_trace_is_every_batch_in_microseconds():
    with RolloutEngine(tiny.build(), EngineConfig(max_rows=3, page_tokens=4)) as engine:
        tracer = Tracer(engine.device)
        with engine.observing(tracer):
            engine.generate(tiny.prompts(5), SamplingParams(max_new_tokens=6))
        steps, decoded = engine.stats.engine_steps, engine.stats.decoded_rows
    events = timeline.chrome_trace(tracer.timeline)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == list(timeline.TRACKS)
    tracks = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert min(tracks.values()) == 1  # Perfetto reserves 0
    spans = [(event["tid"], event["name"]) for event in events if event["ph"] == "X"]
    kinds = {name: {kind for tid, kind in spans if tid == tracks[name]} for name in tracks}
    assert kinds == {
        "host": {"plan", "launch", "wait", "settle"},
        "h2d": {"h2d"},
        "compute": {"prefill", "decode"},
        "d2h": {"d2h"},
    }
    batches = [e for e in events if e["ph"] == "X" and e["tid"] == tracks["compute"]]
    assert len(batches) == steps
    lanes = [[e for e in events if e["tid"] == tracks[n] and e["ph"] == "X"] for n in tracks]
    for up, run, down in zip(*lanes[1:], strict=True):
        assert up["ts"] + up["dur"] <= run["ts"] + 1e-3
        assert run["ts"] + run["dur"] <= down["ts"] + 1e-3
    assert sum(event["args"]["rows"] for event in batches) == decoded
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    ends = max(event["ts"] + event["dur"] for event in batches) / 1e6
    assert ends == pytest.approx(tracer.timeline.span_s("compute"), rel=0.2)
    assert timeline.chrome_trace(timeline.Timeline())["traceEvents"][-1]["ph"] == "M"


def test_one_batch_and_one_completion_are_drawn_too(tmp_path):
    batch = timeline.Interval("compute", "decode", 1.0, 1.5, 3)
    draw_progress(timeline.Timeline([batch]), tmp_path / "progress.png")
    draw_lengths([1], tmp_path / "lengths.png")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(PNG)


@pytest.fixture
def figures(monkeypatch):
    """Collect figures instead of writing files."""
    drawn = []
    monkeypatch.setattr(traces, "_save", lambda figure, path: drawn.append(figure))
    return drawn


@pytest.mark.parametrize("lengths", [[3, 3, 31, 32, 32, 32], [99, 100, 100, 250, 1]])
def test_a_bar_is_as_high_as_completions_are_many_and_stands_at_their_length(figures, lengths):
    draw_lengths(lengths, None)
    (axis,) = figures[0].axes
    for bar in axis.patches:
        ours = [n for n in lengths if bar.get_x() < n < bar.get_x() + bar.get_width()]
        assert bar.get_height() == len(ours)
        assert bar.get_width() == 1 + max(lengths) // 100
    assert sum(bar.get_height() for bar in axis.patches) == len(lengths)


def test_rows_and_speed_are_drawn_as_they_were(figures):
    spans = [(i * 0.2, (i + 1) * 0.2, 8 if i < 10 else 2) for i in range(20)]
    batches = [timeline.Interval("compute", "decode", 5 + a, 5 + b, n) for a, b, n in spans]
    draw_progress(timeline.Timeline(batches), None)
    live, speed = figures[0].axes
    (line,) = live.lines
    assert line.get_xdata() == pytest.approx([0.2 * (i + 1) for i in range(20)])
    assert list(line.get_ydata()) == [8] * 10 + [2] * 10
    rates, edges, _ = speed.patches[0].get_data()
    assert edges == pytest.approx([0, 2, 4])
    assert sum(2 * rates) == pytest.approx(10 * 8 + 10 * 2)
    assert rates[0] > 35
    assert (live.get_ylabel(), speed.get_ylabel()) == ("rows live", "tokens/s")


def test_a_picture_shows_a_lane_a_track_and_idle_time_in_red(tmp_path, monkeypatch):
    pyplot, drawn = timeline.open_pyplot(), []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    spans = [("host", 0, 1), ("h2d", 1, 2), ("compute", 2, 4), ("compute", 7, 8), ("d2h", 8, 9)]
    made = timeline.Timeline([timeline.Interval(track, track, a, b) for track, a, b in spans])
    timeline.draw({"step 3": made}, tmp_path / "timeline.png")
    (axis,) = drawn[0].axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    lanes = {name: set() for name in names}
    for bars in axis.collections:
        color = to_hex(bars.get_facecolor()[0])
        for path in bars.get_paths():
            (left, bottom), (right, _) = path.get_extents().get_points()
            lanes[names[int(bottom)]].add((color == "#d62728", left / 1e3, right / 1e3))
    assert lanes == {
        "host": {(False, 0, 1)},
        "h2d": {(False, 1, 2)},
        "compute": {(False, 2, 4), (True, 4, 7), (False, 7, 8)},
        "d2h": {(False, 8, 9)},
    }
    assert axis.get_title(loc="left") == "step 3: device busy 50.0%, idle in red"


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
