"""`python -m rollout bench` at toy size."""

import json
import shlex
import subprocess
import sys

import numpy as np
import pytest
import tiny
from rich.console import Console
from transformers import T5Config

from rollout import ConfigError
from rollout.telemetry import timeline
from rollout.tools import bench, workload
from rollout.tools import parity as difference


def test_every_mode_is_timed_on_the_same_rows_and_written_down(tmp_path):
    tiny.build().config.save_pretrained(tmp_path / "model")
    lengths = ["--rows", "4", "--prompt-tokens", "6", "--new-tokens", "8"]
    command = [sys.executable, "-m", "rollout", "bench", "--model", tmp_path / "model", *lengths]
    command += ["--modes", "two-slot,one-slot,generate", "--json", tmp_path / "found.json"]
    command += ["--timeline", tmp_path / "found.png"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"].endswith(shlex.join(map(str, command[4:])))
    assert list(found["modes"]) == ["two-slot", "one-slot", "generate"]
    for mode, measured in found["modes"].items():
        assert mode in result.stdout
        assert measured["tokens_per_s"] == pytest.approx(4 * 8 / measured["total_s"])
        assert measured["floor_ms"] > 0
        assert measured["floor_share"] == pytest.approx(measured["floor_ms"] / measured["step_ms"])
    for mode in ("two-slot", "one-slot"):
        assert found["modes"][mode]["host_us"] > 0
        assert found["modes"][mode]["host_median_us"] > 0
        assert 0 < found["modes"][mode]["busy_share"] <= 1
        assert found["modes"][mode]["h2d_bytes"] == 4 * 8  # one lane number per row
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_counts_weights_without_the_embedding_and_all_keys_and_values(tied):
    model = tiny.build(tie_word_embeddings=tied)
    work = workload.Workload(model, rows=2, prompt_tokens=50, new_tokens=3, bandwidth=1e6)
    weights = sum(p.numel() for p in model.parameters()) * 4
    read = weights if tied else weights - model.get_input_embeddings().weight.numel() * 4
    keys_and_values = 2 * 3 * 2 * 16 * 4  # K and V, layers, heads, head size, float32
    assert work.cost.kv_token_bytes == keys_and_values
    tokens = (50 + 51 + 52) + 50
    assert work.floor_s(7, [3, 1]) == pytest.approx((7 * read + tokens * keys_and_values) / 1e6)


def test_lognormal_lengths_have_a_quarter_for_a_median_and_a_cap():
    work = workload.Workload(tiny.build(), 4001, 4, 1000, 1.0, lengths="lognormal")
    assert np.median(work.row_tokens) == pytest.approx(250, rel=0.05)
    assert max(work.row_tokens) == 1000
    assert min(work.row_tokens) >= 1


def test_rows_of_a_workload_end_where_it_says():
    work = workload.Workload(tiny.build(), 5, 3, 12, 1.0, lengths="lognormal")
    with bench.engine_run(work, num_slots=2) as run:
        for lengths in (work.row_tokens, [2] * 5, [12] * 5):
            run.generate(lengths)
            overruns = run.num_tokens - lengths  # an aborted row may have one more token in flight
            assert set(overruns) <= {0, 1}
            assert not run.engine.busy


def test_a_timeline_knows_its_gaps_its_decoding_and_its_middle():
    spans = [("prefill", 0, 2), ("decode", 3, 5), ("decode", 4, 6), ("decode", 8, 9)]
    made = timeline.Timeline([timeline.Interval("compute", *span) for span in spans])
    made.intervals += [
        timeline.Interval("host", "wait", 0, 9),
        timeline.Interval("h2d", "h2d", 1, 2),
    ]
    assert made.gaps("compute") == [(2, 3), (6, 8)]
    assert made.busy_share("compute") == pytest.approx(6 / 9)
    assert made.decoding().busy_share("compute") == pytest.approx(4 / 6)
    assert made.on("host") == []
    assert [i.start_s for i in made.middle(4).on("compute")] == [3, 4]
    cut = [(i.start_s, i.stop_s) for i in made.middle(1.5).on("compute")]
    assert cut == [(3.25, 4.75), (4, 4.75)]  # the first one began before the cut the cut
    assert made.busy_share("d2h") != made.busy_share("d2h")


@pytest.mark.parametrize("step_s", [0.005, 0.1])
def test_a_picture_covers_about_eight_steps_however_long_they_are(step_s):
    starts = [step_s * number for number in range(100)]
    spans = [timeline.Interval("compute", "decode", s, s + 0.9 * step_s) for s in starts]
    shown = timeline.middle_steps(timeline.Timeline(spans)).on("compute")
    assert 8 <= len(shown) <= 9
    assert timeline.middle_steps(timeline.Timeline([])).intervals == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "two-slot,vllm"], "--modes vllm: must be one of two-slot"),
        (["--new-tokens", "2"], "--new-tokens 2"),
        (["--modes", "trl-cb"], "--modes trl-cb: needs a GPU"),
        (["--model", "no/such"], "--model no/such: no config found, use qwen3-0.6b, qwen3-8b"),
        (["--rows", "-3"], "--rows=-3: must be an integer >= 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens=0: must be"),
        (["--lora-rank", "-2"], "--lora-rank=-2: must be an integer >= 0"),
        (["--kv-gib", "nan"], "--kv-gib nan: must be > 0"),
        (["--kv-gib", "0"], "--kv-gib 0.0: must be > 0"),
        (["--json", "no/such/file"], "no/such/file: folder no/such does not exist"),
        (["--timeline", "no/such/file"], "no/such/file: folder no/such does not exist"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        bench.main(arguments)


@pytest.mark.parametrize("option", ["--rows", "--tokens"])
def test_exact_doctors_bad_arguments_are_named_too(option):
    with pytest.raises(ConfigError, match=f"^{option}=-1: must be an integer"):
        difference.main([option, "-1"], Console())


def test_a_model_of_another_kind_is_named(tmp_path):
    T5Config(d_model=64, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="t5 is not a causal language model"):
        bench.main(["--model", str(tmp_path)])


def rollout_command(*arguments):
    command = [sys.executable, "-m", "rollout", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_asked_wrongly_is_said_in_one_line():
    result = rollout_command("bench", "--modes", "two-slots")
    assert result.returncode == 1
    assert result.stderr.startswith("ConfigError: --modes two-slots: must be one of two-slot")
    assert "Traceback" not in result.stderr


def test_doctor_says_where_its_options_belong():
    result = rollout_command("doctor", "--model", "qwen3-8b")
    assert result.returncode == 2
    assert result.stderr.startswith("doctor takes no --model; it belongs to: python -m rollout doc")


def test_an_unknown_command_prints_what_there_is():
    result = rollout_command("speed")
    assert result.returncode == 2
    assert "bench" in result.stdout
    assert result.stderr == "unknown command: speed\n"
