"""`python -m rollout bench` at toy size."""

import json
import subprocess
import sys

import pytest
import tiny

from rollout import ConfigError, bench


def test_every_mode_is_timed_on_the_same_rows_and_written_down(tmp_path):
    tiny.build().config.save_pretrained(tmp_path / "model")
    lengths = ["--rows", "4", "--prompt-tokens", "6", "--new-tokens", "8"]
    command = [sys.executable, "-m", "rollout", "bench", "--model", tmp_path / "model", *lengths]
    command += ["--modes", ",".join(bench.MODES), "--json", tmp_path / "found.json"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [measurement["mode"] for measurement in found] == list(bench.MODES)
    for measurement in found:
        assert measurement["mode"] in result.stdout
        assert measurement["tokens_per_s"] == pytest.approx(4 * 8 / measurement["total_s"])
        assert measurement["floor_ms"] > 0
        share = measurement["floor_ms"] / measurement["step_ms"]
        assert measurement["floor_share"] == pytest.approx(share)
    assert found[0]["host_us"] > 0


def test_the_floor_counts_weights_without_the_embedding_and_all_keys_and_values():
    for tied in (False, True):
        model = tiny.build(tie_word_embeddings=tied)
        work = bench.Workload(model, rows=10, prompt_tokens=50, new_tokens=100, bandwidth=1e6)
        weights = sum(p.numel() for p in model.parameters()) * 4
        read = weights if tied else weights - model.get_input_embeddings().weight.numel() * 4
        assert work.floor_ms(kv_token_bytes=7) == pytest.approx((read + 10 * 100 * 7) / 1e3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "two-slot,vllm"], "--modes vllm: it must be of two-slot"),
        (["--new-tokens", "2"], "--new-tokens 2"),
        (["--model", "no/such"], "--model no/such: neither one of qwen3-0.6b, qwen3-8b nor"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        bench.main(arguments)


def test_an_unknown_command_prints_what_there_is():
    command = [sys.executable, "-m", "rollout", "speed"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "bench" in result.stdout
