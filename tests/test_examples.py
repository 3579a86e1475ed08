"""The example script at toy size, as a user starts it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_length

ROOT = Path(__file__).parent.parent


def run(tmp_path, *arguments, script="grpo.py", config="demo.yaml"):
    command = [sys.executable, ROOT / "examples" / script, "--config", ROOT / "examples" / config]
    command += ["--max_steps", "3", "--per_device_train_batch_size", "16", *arguments]
    command += ["--output_dir", tmp_path / "outputs"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    return subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_the_engine_alone_generates(tmp_path):
    result = subprocess.run(
        [sys.executable, ROOT / "examples/generate.py", "--rows", "3", "--max_new_tokens", "5"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^ +-\d+\.\d+ (?:stop|length) ", result.stdout, re.MULTILINE)) == 3
    assert "tokens/s" in result.stdout


def test_the_demo_prints_its_table_and_leaves_a_wandb_run(tmp_path):
    result = run(tmp_path, "--required_gain", "-1")
    assert result.returncode == 0, result.stderr
    for row in ("first 10 steps", "last 10 steps", "tokens/s", "time generating", "Δlogp"):
        assert re.search(rf"{row}.*│ +\S+", result.stdout), result.stdout
    folder = re.search(r"(wandb/offline-run-\S+)", result.stdout)[1]
    assert list((tmp_path / folder).glob("*.wandb"))
    assert "3/3" in result.stderr


def test_ppo_prints_its_table_too(tmp_path):
    arguments = ("--required_gain", "-1", "--report_to", "none", "--value_epochs", "2")
    result = run(tmp_path, *arguments, script="ppo.py", config="demo_ppo.yaml")
    assert result.returncode == 0, result.stderr
    for row in ("PPO", "last 10 steps", "tokens/s", "explained by the critic"):
        assert row in result.stdout
    assert "3/3" in result.stderr


def test_models_and_datasets_are_loaded_by_name_or_folder(tmp_path):
    """The loading code of real use, on folders, as no hub can be reached here."""
    tokenizer = run_length.build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    run_length.build_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    ask = [[{"role": "user", "content": f"a*{n}="}] for n in range(1, 20)]
    rows = [{"prompt": prompt, "solution": str(n)} for n, prompt in enumerate(ask, start=1)]
    (tmp_path / "data/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folders = ["--model", tmp_path / "model", "--dataset", tmp_path / "data"]
    result = run(tmp_path, *folders, "--required_gain", "-1", "--report_to", "none")
    assert result.returncode == 0, result.stderr
    assert re.search(r"tokens/s.*│ +\d+", result.stdout)


def test_a_run_without_a_rising_reward_fails(tmp_path):
    result = run(tmp_path, "--required_gain", "0.9", "--report_to", "none")
    assert result.returncode == 1
    assert re.search(r"rose by -?0\.\d+, less than 0.9", result.stderr)


def test_trl_generates_by_itself_when_asked(tmp_path):
    result = run(tmp_path, "--rollouts", "trl", "--required_gain", "-1", "--report_to", "none")
    assert result.returncode == 0, result.stderr
    assert "tokens/s" not in result.stdout


def test_an_unknown_argument_is_refused(tmp_path):
    result = run(tmp_path, "--max_row", "3", "--report_to", "none")
    assert result.returncode != 0
    assert "max_row" in result.stderr


@pytest.mark.parametrize(
    ("completion", "score"),
    [("aaa<eos>", 1.0), ("aaa", 0.75), ("aa<eos>", 0.75), ("bbb<eos>", 0.25), ("aaaaaa", 0.5)],
)
def test_the_demos_reward_is_exact(completion, score):
    tokenizer = run_length.build_tokenizer()
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    assert run_length.reward([ids], ["aaa"]) == [score]
