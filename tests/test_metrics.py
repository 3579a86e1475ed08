"""What stands in the trainer's log beside TRL's own numbers."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import trl_trainer

from trainers.metrics import gap_metrics

RAW = "sampling/raw_importance_sampling_ratio"


class Ranks:
    """An accelerator of two ranks that both have what this one has, or other rows."""

    def __init__(self, scale=1.0):
        self._scale = scale

    def gather(self, tensor):
        return torch.cat([tensor, tensor * self._scale])


def trainer(mode="token_truncate", accelerator=None):
    metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    return SimpleNamespace(
        accelerator=accelerator or Ranks(),
        vllm_importance_sampling_mode=mode,
        _metrics=metrics,
    )


def scored(difference, mask=None, *, corrected=True):
    """What TRL returns for log-probabilities that are `difference` above the rollout's."""
    sampled = torch.full_like(difference, -2.0)
    extra = {"importance_sampling_ratio": torch.ones(())} if corrected else {}
    return {
        "sampling_per_token_logps": sampled,
        "old_per_token_logps": sampled + difference,
        "completion_mask": torch.ones_like(difference).long() if mask is None else mask,
        **extra,
    }


def test_drift_is_told_apart_by_position():
    difference = torch.zeros(2, 20_000)
    difference[:, :1024], difference[:, 1024:4096] = 0.1, -0.2
    difference[:, 4096:16384], difference[:, 16384:] = 0.3, -0.4
    found = gap_metrics(trainer(), scored(difference, corrected=False), sample=False)
    assert found == pytest.approx(
        {
            "rollout/logp_gap": difference.abs().mean().item(),
            "rollout/logp_gap_max": 0.4,
            "rollout/logp_gap/0-1K": 0.1,
            "rollout/logp_gap/1-4K": 0.2,
            "rollout/logp_gap/4-16K": 0.3,
            "rollout/logp_gap/16K+": 0.4,
        },
        rel=1e-4,
    )


def test_positions_without_tokens_have_no_metric():
    difference, mask = torch.full((2, 3000), 0.5), torch.zeros(2, 3000).long()
    mask[:, :10] = 1
    found = gap_metrics(trainer(), scored(difference, mask), sample=False)
    assert found["rollout/logp_gap"] == found["rollout/logp_gap/0-1K"] == pytest.approx(0.5)
    assert "rollout/logp_gap/1-4K" not in found


def test_tokens_of_tools_do_not_count():
    output = scored(torch.tensor([[0.1, 9.0]]))
    output["tool_mask"] = torch.tensor([[1, 0]])
    found = gap_metrics(trainer(), output, sample=False)
    assert found["rollout/logp_gap_max"] == pytest.approx(0.1)
    assert found[f"{RAW}/max"] == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize(
    ("mode", "ratios"),
    [
        ("token_truncate", [math.e, 1.0, math.exp(2.0)]),
        ("sequence_mask", [math.e, math.exp(2.0)]),
    ],
)
def test_the_raw_ratio_is_trls_before_clipping(mode, ratios):
    output = scored(torch.tensor([[1.0, 0.0], [2.0, 7.0]]), torch.tensor([[1, 1], [1, 0]]))
    found = gap_metrics(trainer(mode), output, sample=False)
    assert found[f"{RAW}/mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert found[f"{RAW}/max"] == pytest.approx(max(ratios))


def test_other_ranks_count():
    found = gap_metrics(
        trainer(accelerator=Ranks(3.0)), scored(torch.full((1, 4), 0.1)), sample=False
    )
    assert found["rollout/logp_gap_max"] == pytest.approx(0.3)
    assert found["rollout/logp_gap"] == pytest.approx(0.1)


def test_without_log_probabilities_there_is_nothing_to_compare():
    output = scored(torch.zeros(1, 2))
    assert gap_metrics(trainer(), {**output, "sampling_per_token_logps": None}, sample=True) == {}
    assert gap_metrics(trainer(), {**output, "old_per_token_logps": None}, sample=False) == {}


def test_a_training_logs_them_for_training_and_evaluation_apart(tmp_path):
    run = trl_trainer.build(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trl_trainer.attach(run)
    run.train()
    names = ("rollout/logp_gap/0-1K", f"{RAW}/mean", f"{RAW}/max")
    for name in (*names, *(f"eval_{name}" for name in names)):
        assert len(trl_trainer.logged(run, name)) == 2
    for value in trl_trainer.logged(run, f"{RAW}/max"):
        assert value == pytest.approx(1.0, abs=1e-4)
    gaps = trl_trainer.logged(run, "rollout/logp_gap")
    assert trl_trainer.logged(run, "rollout/logp_gap/0-1K") == gaps
