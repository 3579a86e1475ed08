"""The example scripts at toy size, run as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import run_length

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
TOY = ["--max_steps", "3", "--per_device_train_batch_size", "16", "--output_dir", "outputs"]
SILENT = ["--required_gain", "-1", "--report_to", "none"]


def environment(home):
    return {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(home)}


def training(*arguments, script="grpo.py", config="demo.yaml"):
    return [EXAMPLES / script, "--config", EXAMPLES / config, *TOY, *arguments]


def model_and_dataset(folder):
    """A model and a dataset in folders, because tests have no network."""
    tokenizer = run_length.build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    run_length.build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    ask = [[{"role": "user", "content": f"a*{n}="}] for n in range(1, 20)]
    rows = [{"prompt": prompt, "solution": str(n)} for n, prompt in enumerate(ask, start=1)]
    (folder / "data/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["--model", folder / "model", "--dataset", folder / "data"]


def dataset_of_one_row(folder, column):
    """A dataset smaller than a batch."""
    (folder / column).mkdir()
    (folder / column / "train.jsonl").write_text(json.dumps({column: "a*1=", "solution": "a"}))
    return folder / column


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Results of all runs except the demo's; they share imports."""
    folder = tmp_path_factory.mktemp("examples")
    value_epochs = ("--value_epochs", "2")
    two_rollouts = ("--gradient_accumulation_steps", "2", "--steps_per_generation", "1")
    commands = {
        "generate": [EXAMPLES / "generate.py", "--rows", "3", "--max_new_tokens", "5"],
        "ppo": training(*SILENT, *value_epochs, script="ppo.py", config="demo_ppo.yaml"),
        "folders": training(*model_and_dataset(folder), *SILENT, "--log_level", "info"),
        "no gain": training("--required_gain", "0.9", "--report_to", "none"),
        "trl": training("--rollouts", "trl", *SILENT),
        "as drawn": training("--vllm_importance_sampling_correction", "false", *SILENT),
        "no bar": training("--disable_tqdm", "true", *two_rollouts, *SILENT),
        "unknown": training("--max_row", "3", "--report_to", "none"),
        "no prompt": training("--dataset", dataset_of_one_row(folder, "question"), *SILENT),
        "no step": training("--dataset", dataset_of_one_row(folder, "prompt"), *SILENT),
    }
    shared = environment(folder) | {"PYTHONPATH": f"{ROOT}:{EXAMPLES}"}
    return forked.run_all(folder, ["ppo", "generate"], commands, shared)


def test_the_engine_alone_generates(outcomes):
    result = outcomes["generate"]
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^ +-\d+\.\d+ (?:stop|length) ", result.stdout, re.MULTILINE)) == 3
    assert "tokens/s" in result.stdout


def test_the_demo_prints_its_table_and_leaves_a_wandb_run(tmp_path):
    result = subprocess.run(
        [sys.executable, *map(str, training("--required_gain", "-1"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for row in ("first 10 steps", "last 10 steps", "tokens/s", "time generating", "Δlogp"):
        assert re.search(rf"{row}.*│ +\S+", result.stdout), result.stdout
    folder = re.search(r"(wandb/offline-run-\S+)", result.stdout)[1]
    assert list((tmp_path / folder).glob("*.wandb"))
    assert "3/3" in result.stderr


def test_ppo_prints_its_table_too(outcomes):
    result = outcomes["ppo"]
    assert result.returncode == 0, result.stderr
    for row in ("PPO", "last 10 steps", "tokens/s", "explained by the critic"):
        assert row in result.stdout
    assert "3/3" in result.stderr


@pytest.mark.parametrize(
    ("name", "status", "shown", "absent"),
    [
        ("folders", 0, [r"tokens/s.*│ +\d+"], []),
        ("trl", 0, [], ["tokens/s"]),
        ("as drawn", 0, [r"tokens/s.*│ +\d+", "share of time generating"], ["Δlogp"]),
        # With several rollouts per step, the log has only the mean of their seconds.
        ("no bar", 0, ["training time", "generated tokens/s"], ["3/3", "share of time generating"]),
        ("no gain", 1, [r"rose by -?0\.\d+, less than 0.9"], []),
        ("unknown", 2, ["max_row"], []),
        ("no prompt", 1, ["question has no column prompt; see --help"], []),
        ("no step", 1, ["No training step ran"], []),
    ],
)
def test_a_run_prints_what_it_should(outcomes, name, status, shown, absent):
    result = outcomes[name]
    assert result.returncode == status, result.stderr
    printed = result.stdout + result.stderr
    assert all(re.search(text, printed) for text in shown), printed
    assert not any(text in printed for text in absent), printed


def test_each_rollout_has_a_line_where_one_is_asked_for(outcomes):
    line = r"rollout: \d+ rows, .* tok/s"
    assert len(re.findall(line, outcomes["folders"].stderr)) == 3
    assert not re.findall(line, outcomes["trl"].stderr + outcomes["ppo"].stderr)


@pytest.mark.parametrize(
    ("completion", "score"),
    [("aaa<eos>", 1.0), ("aaa", 0.75), ("aa<eos>", 0.75), ("bbb<eos>", 0.25), ("aaaaaa", 0.5)],
)
def test_the_demos_reward_is_exact(completion, score):
    tokenizer = run_length.build_tokenizer()
    ids = tokenizer(completion, add_special_tokens=False)["input_ids"]
    assert run_length.reward([ids], ["aaa"]) == [score]
