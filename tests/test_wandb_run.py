"""A training's W&B run, read back from disk, against counters that the test keeps itself."""

import builtins
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trl_trainer
import wandb
import wandb_file

from rollout.attribution import PARTS
from trainers.dashboard import SECTIONS

GPU_ALONE = {"gpu_busy", "mbu", "mfu", "gpu_sm_active", "gpu_tensor_active", "gpu_dram_active"}
GPU_ALONE |= {"gpu_nvml_utilization"}
LONG_ALONE = {"logp_gap/1-4K", "logp_gap/4-16K", "logp_gap/16K+"}  # completions are short here
CAST_ALONE = {"cast_weights_gib", "cast_weights_ms"}  # weights have the dtype of the forward here


def count(trainer, generator):
    """For each rollout: its mode, step, completions, and seconds on the test's own clock."""
    found, generate = [], generator.engine.generate

    def counting(*args, **kwargs):
        began = time.perf_counter()
        completions = generate(*args, **kwargs)
        mode = "train" if trainer.model.training else "eval"
        seconds = time.perf_counter() - began
        found.append((mode, trainer.state.global_step, completions, seconds))
        return completions

    generator.engine.generate = counting
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What one run has on disk, what its rollouts were, where the files are, and its seconds."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        wandb.teardown()  # another test's run left the folder of it as the process's
        options = {"eval_strategy": "steps", "eval_steps": 2, "max_completion_length": 30}
        trainer = trl_trainer.build(folder, max_steps=4, report_to="wandb", **options)
        trainer.eval_dataset = trainer.eval_dataset.select(range(2))  # one batch
        config = replace(trl_trainer.ENGINE, trace="every:2")
        rollouts = count(trainer, trl_trainer.attach(trainer, config))
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        wandb.finish()
    return wandb_file.history(folder), rollouts, folder, seconds


def rows_with(run, name):
    return [row for row in run[0] if name in row]


def of(run, mode):
    return [rollout for rollout in run[1] if rollout[0] == mode]


def test_every_rollout_is_a_row_on_the_trainers_step(run):
    rows = rows_with(run, "train/rollout/generated_tok_s")
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]
    assert [step + 1 for _, step, _, _ in of(run, "train")] == [1, 2, 3, 4]
    evaluations = rows_with(run, "eval/rollout/generated_tok_s")
    assert [row["train/global_step"] for row in evaluations] == [2, 4]
    assert [step for _, step, _, _ in of(run, "eval")] == [2, 4]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_values_are_the_tests_own_counts(run, mode):
    rows = rows_with(run, f"{mode}/rollout/generated_tok_s")
    for row, (_, _, completions, seconds) in zip(rows, of(run, mode), strict=True):
        got = {n.removeprefix(f"{mode}/rollout/"): v for n, v in row.items()}
        lengths = sorted(len(completion.token_ids) for completion in completions)
        stopped = sum(c.finish_reason == "stop" for c in completions) / len(completions)
        assert got["length/mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert got["length/max"] == lengths[-1]
        assert lengths[3] <= got["length/p50"] <= lengths[4]
        assert lengths[-2] <= got["length/p95"] <= lengths[-1]
        assert got["finished/stop"] == pytest.approx(stopped)
        assert got["finished/stop"] + got["finished/length"] == pytest.approx(1)
        assert got["duration_s"] == pytest.approx(seconds, rel=0.2, abs=0.02)
        assert got["generated_tok_s"] == pytest.approx(sum(lengths) / got["duration_s"])
        assert got["policy_version"] == completions[0].policy_versions[0][0]
        assert got["graphs_captured"] == got["preemptions"] == 0
        assert 0 <= got["overrun_rows"] <= len(completions)
        assert 1 <= got["rows_live"] <= trl_trainer.ENGINE.max_rows
        # A step is a rollout and more; its tokens a second follow from its share.
        step_s = sum(lengths) / got["effective_tok_s"]
        assert got["tok_s_per_gpu"] == got["effective_tok_s"]
        rollout_s = got["duration_s"] + got["sleep_ms"] / 1e3
        assert got["step_share"] == pytest.approx(rollout_s / step_s)
        assert 0 < got["step_share"] < 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_shares_of_the_time_add_up_to_1(run, mode):
    for row in rows_with(run, f"{mode}/rollout/generated_tok_s"):
        shares = {part: row[f"{mode}/rollout/time/{part}"] for part in PARTS}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert min(shares.values()) >= 0
        for part in ("compute", "tail", "prefill", "host_bound", "h2d_wait", "sleep"):
            assert shares[part] > 0
        assert shares["padding"] == shares["preemption"] == 0


def test_a_steps_tokens_a_second_are_over_the_steps_whole_time(run):
    rows = rows_with(run, "train/rollout/effective_tok_s")
    tokens = [
        sum(len(c.token_ids) for c in completions) for _, _, completions, _ in of(run, "train")
    ]
    steps_s = sum(
        n / row["train/rollout/effective_tok_s"] for n, row in zip(tokens, rows, strict=True)
    )
    assert sum(seconds for _, _, _, seconds in of(run, "train")) < steps_s < run[3]


def test_the_dashboard_has_a_panel_for_every_metric_and_no_other(run):
    logged = {
        name.removeprefix("train/")
        for row in run[0]
        for name, value in row.items()
        if name.startswith(("train/rollout/", "train/sampling/raw_"))
        and not isinstance(value, dict)
    }
    shown = [name for panels in SECTIONS.values() for names in panels.values() for name in names]
    assert len(shown) == len(set(shown))
    absent = {f"rollout/{name}" for name in GPU_ALONE | LONG_ALONE | CAST_ALONE}
    assert set(shown) == logged | absent
    assert not logged & absent


def test_pictures_lie_on_the_trainers_step(run):
    rows = rows_with(run, "train/rollout/timeline")
    assert [row["train/global_step"] for row in rows] == [1, 3]
    for row in rows:
        for name in ("timeline", "progress", "lengths"):
            picture = row[f"train/rollout/{name}"]
            assert picture["_type"] == "image-file"
            (found,) = run[2].rglob(Path(picture["path"]).name)
            assert found.read_bytes().startswith(b"\x89PNG")


def test_without_a_report_nobody_of_ours_imports_wandb(tmp_path, monkeypatch):
    importers, plain = set(), builtins.__import__

    def watching(name, globals=None, *rest):
        if name.partition(".")[0] == "wandb":
            importers.add((globals or {}).get("__name__", "").partition(".")[0])
        return plain(name, globals, *rest)

    trainer = trl_trainer.build(tmp_path, max_steps=1)
    monkeypatch.setattr(builtins, "__import__", watching)
    trl_trainer.attach(trainer, replace(trl_trainer.ENGINE, trace="last"))
    trainer.train()
    assert (tmp_path / "rollouts" / "step-000001-timeline.png").exists()
    assert not importers & {"rollout", "trainers"}
