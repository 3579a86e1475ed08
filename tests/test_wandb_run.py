"""A training's W&B run, read back from disk, against the test's own counters."""

import builtins
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles

import pytest
import torch
import trl_trainer
import wandb
import wandb_file

from rollout.telemetry.time_shares import PARTS
from trainers.reporting.dashboard import PICTURES, SECTIONS

GPU_ALONE = {"gpu_busy", "mbu", "mfu", "gpu_sm_active", "gpu_tensor_active", "gpu_dram_active"}
GPU_ALONE |= {"gpu_nvml_utilization"}
LONG_ALONE = {"logp_gap/1-4K", "logp_gap/4-16K", "logp_gap/16K+"}  # completions are short here
CAST_ALONE = {"cast_weights_gib", "cast_weights_ms"}  # weights have the dtype of the forward here


PAGE_BYTES = 4 * 2 * 3 * 2 * 16 * 4  # tokens, keys and values, layers, heads, head size, float32
# So few pages that rows are preempted, some of them to the host.
TIGHT = {"kv_bytes": 15 * PAGE_BYTES, "offload_bytes": 6 * PAGE_BYTES}


@dataclass
class Rollout:
    """The test's observations of one rollout."""

    mode: str
    step: int
    completions: list = field(default_factory=list)
    batches: list = field(default_factory=list)
    pages: list = field(default_factory=list)  # used, shared, free, for each batch
    kv_bytes: int = 0
    seconds: float = 0.0
    run_s: float = 0.0  # inside batches
    sleep_s: float = 0.0
    step_s: float = 0.0
    gaps: torch.Tensor | None = None  # signed, per trainable token
    row_gaps: torch.Tensor | None = None

    @property
    def lengths(self):
        return sorted(len(completion.token_ids) for completion in self.completions)


class Counters:
    """Watches a trainer and its engine from outside."""

    def __init__(self, trainer, generator):
        self.rollouts, self._trainer, self._engine = [], trainer, generator.engine
        engine = self._engine
        for owner, method, watcher in (
            (engine, "generate", self._generate),
            (engine, "sleep", self._sleep),
            (engine.scheduler, "schedule", self._schedule),
            (engine.worker.graphs, "run", self._run),
            (trainer, "_generate_and_score_completions", self._score),
            (trainer, "training_step", self._train),
            (trainer, "prediction_step", self._step),
        ):
            setattr(owner, method, partial(watcher, getattr(owner, method)))

    def _generate(self, generate, *args, **kwargs):
        mode = "train" if self._trainer.model.training else "eval"
        self.rollouts.append(Rollout(mode, self._trainer.state.global_step))
        began, now = time.perf_counter(), self.rollouts[-1]
        now.completions = generate(*args, **kwargs)
        now.seconds = time.perf_counter() - began
        return now.completions

    def _sleep(self, sleep):
        began = time.perf_counter()
        sleep()
        self.rollouts[-1].sleep_s = time.perf_counter() - began

    def _schedule(self, schedule, version):
        batch = schedule(version)
        self.rollouts[-1].batches += [batch] if batch else []
        return batch

    def _run(self, run, slot):
        pages, now, began = self._engine.scheduler.pages, self.rollouts[-1], time.perf_counter()
        run(slot)
        now.run_s += time.perf_counter() - began
        now.pages.append((pages.num_used, pages.num_shared, pages.num_free))
        now.kv_bytes = max(now.kv_bytes, self._engine.worker.kv_cache.num_bytes)

    def _score(self, score, inputs):
        scored = score(inputs)
        gaps = scored["old_per_token_logps"] - scored["sampling_per_token_logps"]
        mask = scored["completion_mask"]
        self.rollouts[-1].gaps = gaps[mask.bool()]
        self.rollouts[-1].row_gaps = (gaps * mask).sum(1)
        return scored

    def _train(self, train, *args):
        began = time.perf_counter()
        loss = train(*args)
        self.rollouts[-1].step_s = time.perf_counter() - began  # without the optimizer
        return loss

    def _step(self, step, *args, **kwargs):
        began = time.perf_counter()
        found = step(*args, **kwargs)
        self.rollouts[-1].step_s = time.perf_counter() - began
        return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run: its data on disk, its rollouts, its folder, its seconds."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        wandb.teardown()  # forget the folder of another test's run
        options = {"eval_strategy": "steps", "eval_steps": 2, "max_completion_length": 30}
        trainer = trl_trainer.build(folder, max_steps=4, report_to="wandb", **options)
        trainer.eval_dataset = trainer.eval_dataset.select(range(2))  # one batch
        config = replace(trl_trainer.ENGINE, trace="every:2", **TIGHT)
        counters = Counters(trainer, trl_trainer.attach(trainer, config))
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        wandb.finish()
    return wandb_file.history(folder), counters.rollouts, folder, seconds


def rows_with(run, name):
    return [row for row in run[0] if name in row]


def of(run, mode):
    return [rollout for rollout in run[1] if rollout.mode == mode]


def pairs(run, mode):
    """Per rollout: logged values by the last part of their name, and the test's observations."""
    rows = rows_with(run, f"{mode}/rollout/generated_tok_s")
    for row, rollout in zip(rows, of(run, mode), strict=True):
        yield (
            {n.removeprefix(f"{mode}/").removeprefix("rollout/"): v for n, v in row.items()},
            rollout,
        )


def test_every_rollout_is_a_row_on_the_trainers_step(run):
    rows = rows_with(run, "train/rollout/generated_tok_s")
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4]
    assert [rollout.step + 1 for rollout in of(run, "train")] == [1, 2, 3, 4]
    evaluations = rows_with(run, "eval/rollout/generated_tok_s")
    assert [row["train/global_step"] for row in evaluations] == [2, 4]
    assert [rollout.step for rollout in of(run, "eval")] == [2, 4]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_completions_are_those_that_trl_got(run, mode):
    for got, rollout in pairs(run, mode):
        lengths = rollout.lengths
        stopped = sum(c.finish_reason == "stop" for c in rollout.completions) / len(lengths)
        assert got["length/mean"] == pytest.approx(mean(lengths))
        assert got["length/p50"] == median(lengths)
        assert got["length/p95"] == pytest.approx(quantiles(lengths, n=20, method="inclusive")[-1])
        assert got["length/max"] == lengths[-1]
        assert got["finished/stop"] == pytest.approx(stopped)
        assert got["finished/length"] == pytest.approx(1 - stopped)
        assert got["policy_version"] == rollout.completions[0].policy_versions[0][0]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_counts_are_those_of_the_batches_that_ran(run, mode):
    for got, rollout in pairs(run, mode):
        decoded = [len(batch.rows) for batch in rollout.batches if len(batch.rows)]
        computed = sum(len(s.tokens) for batch in rollout.batches for s in batch.segments)
        spared = sum(batch.num_shared for batch in rollout.batches)
        offloaded = sum(len(batch.offloads) for batch in rollout.batches) * PAGE_BYTES
        used, shared, free = zip(*rollout.pages, strict=True)
        wanted = {
            "rows_live": mean(decoded),
            "overrun_rows": sum(decoded) - sum(rollout.lengths),
            "prefix_hit_rate": spared / (spared + computed),
            "preemptions": sum(batch.num_preempted for batch in rollout.batches),
            "offloaded_gib": offloaded / 2**30,
            "kv_pages_used": max(used),
            "kv_pages_shared": max(shared),
            "kv_pages_free": min(free),
            "kv_mapped_gib": rollout.kv_bytes / 2**30,
            "graphs_captured": 0,
            "released_gib": 0,
        }
        assert {name: got[name] for name in wanted} == pytest.approx(wanted)
    found = [batch for rollout in of(run, mode) for batch in rollout.batches]
    assert sum(batch.num_preempted for batch in found) > 0
    assert sum(len(batch.offloads) for batch in found) > 0


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_times_are_those_on_the_tests_own_clock(run, mode):
    for got, rollout in pairs(run, mode):
        num_tokens = sum(rollout.lengths)
        assert got["duration_s"] == pytest.approx(rollout.seconds, rel=0.2, abs=0.02)
        assert got["generated_tok_s"] == pytest.approx(num_tokens / got["duration_s"])
        assert got["sleep_ms"] == pytest.approx(rollout.sleep_s * 1e3, rel=0.2, abs=5)
        assert 0 < got["wake_ms"] < rollout.seconds * 1e3
        # A step includes a rollout; its tokens per second follow from the rollout's share.
        step_s = num_tokens / got["effective_tok_s"]
        assert rollout.step_s * 0.9 < step_s < rollout.step_s + 1
        assert got["tok_s_per_gpu"] == got["effective_tok_s"]
        rollout_s = got["duration_s"] + got["sleep_ms"] / 1e3
        assert got["step_share"] == pytest.approx(rollout_s / step_s)
        assert 0 < got["step_share"] < 1


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_shares_of_the_time_add_up_to_1(run, mode):
    for got, rollout in pairs(run, mode):
        shares = {part: got[f"time/{part}"] for part in PARTS}
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert min(shares.values()) > 0
        whole_s = got["duration_s"] + got["sleep_ms"] / 1e3
        inside = sum(shares[part] for part in ("compute", "tail", "prefill")) * whole_s
        assert rollout.run_s * 0.9 <= inside <= rollout.run_s * 1.05
        assert shares["sleep"] * whole_s == pytest.approx((got["sleep_ms"] + got["wake_ms"]) / 1e3)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gaps_are_those_between_the_log_probabilities_that_trl_has(run, mode):
    for got, rollout in pairs(run, mode):
        assert got["logp_gap"] == pytest.approx(rollout.gaps.abs().mean().item(), rel=1e-3)
        assert got["logp_gap/0-1K"] == got["logp_gap"]
        assert got["logp_gap_max"] == pytest.approx(rollout.gaps.abs().max().item(), rel=1e-3)
        ratios = rollout.row_gaps.exp()
        raw = "sampling/raw_importance_sampling_ratio"
        assert got[f"{raw}/mean"] == pytest.approx(ratios.mean().item(), abs=1e-7)
        assert got[f"{raw}/max"] == pytest.approx(ratios.max().item(), abs=1e-7)


def test_a_steps_tokens_a_second_are_over_the_steps_whole_time(run):
    steps_s = [
        sum(rollout.lengths) / got["effective_tok_s"] for got, rollout in pairs(run, "train")
    ]
    assert sum(rollout.seconds for rollout in of(run, "train")) < sum(steps_s) < run[3]


def test_the_dashboard_has_a_panel_for_every_metric_and_no_other(run):
    logged = {
        name.removeprefix("train/")
        for row in run[0]
        for name, value in row.items()
        if name.startswith(("train/rollout/", "train/sampling/raw_", "profiling/"))
        and not isinstance(value, dict)
    }
    shown = [name for panels in SECTIONS.values() for names in panels.values() for name in names]
    assert len(shown) == len(set(shown))
    absent = {f"rollout/{name}" for name in GPU_ALONE | LONG_ALONE | CAST_ALONE}
    timings = {name for name in logged if name.startswith("profiling/")}
    assert set(shown) - timings == (logged - timings) | absent
    assert not logged & absent


def test_pictures_lie_on_the_trainers_step(run):
    rows = rows_with(run, "train/rollout/timeline")
    assert [row["train/global_step"] for row in rows] == [1, 3]
    for row in rows:
        for name in PICTURES.values():
            picture = row[f"train/{name}"]
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
