"""Adds rollout metrics to the trainer's own logs, at the trainer's step.

TRL averages the values in `trainer._metrics[mode]`, adds the prefix `eval_` in evaluation and sends
them to W&B, TensorBoard or trackio with its own metrics.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.errors import RolloutError
from rollout.telemetry.stats import RolloutStats

_SAMPLED_ROWS = 2
# Positions in a completion. Drift grows with the position; one mean over all would hide that.
_BUCKETS = {"0-1K": (0, 1024), "1-4K": (1024, 4096), "4-16K": (4096, 16384), "16K+": (16384, None)}


def rollout_metrics(stats: RolloutStats) -> dict[str, float]:
    """Metrics of one rollout by name, without its times; trainers/README.md has meanings and units.

    Page counts are from the moment of the rollout when most pages were in use.
    """
    metrics = {
        "rollout/generated_tok_s": stats.tokens_per_s,
        "rollout/duration_s": stats.duration_s,
        "rollout/kv_pages_used": stats.peak_pages,
        "rollout/kv_pages_shared": stats.peak_shared_pages,
        "rollout/kv_pages_free": stats.least_free_pages or 0,
        "rollout/preemptions": stats.preemptions,
        "rollout/offloaded_gib": stats.offloaded_bytes / 2**30,
        "rollout/rows_live": stats.rows_live,
        "rollout/overrun_rows": stats.overrun_tokens,
        "rollout/prefix_hit_rate": stats.prefix_hit_rate,
        "rollout/policy_version": stats.policy_version,
        "rollout/graphs_captured": stats.captured_graphs,
        "rollout/kv_mapped_gib": stats.mapped_bytes / 2**30,
        "rollout/released_gib": stats.released_bytes / 2**30,
        "rollout/wake_ms": stats.wake_s * 1e3,
    }
    if stats.cast_bytes:
        metrics["rollout/cast_weights_gib"] = stats.cast_bytes / 2**30
        metrics["rollout/cast_weights_ms"] = stats.cast_s * 1e3
    metrics |= {f"rollout/{name}": share for name, share in stats.device.items()}
    return metrics | _length_metrics(stats)


def _length_metrics(stats: RolloutStats) -> dict[str, float]:
    if not stats.lengths:
        return {}
    median, p95 = np.percentile(stats.lengths, [50, 95])
    stopped = stats.num_stopped / len(stats.lengths)
    return {
        "rollout/length/mean": float(np.mean(stats.lengths)),
        "rollout/length/p50": float(median),
        "rollout/length/p95": float(p95),
        "rollout/length/max": max(stats.lengths),
        "rollout/finished/stop": stopped,
        "rollout/finished/length": 1 - stopped,
    }


def time_metrics(stats: RolloutStats) -> dict[str, float]:
    """Shares of a rollout's time, which add up to 1; `TimeShares` defines them."""
    return {f"rollout/time/{part}": share for part, share in stats.time_shares.items()}


def summary(stats: RolloutStats) -> str:
    """The line that the terminal shows after a rollout."""
    lengths = stats.lengths or [0]
    return (
        f"rollout: {len(stats.lengths)} rows, {stats.generated_tokens:,} tokens, "
        f"{stats.duration_s:.1f} s, {stats.tokens_per_s:,.0f} tok/s; "
        f"mean length {np.mean(lengths):,.0f}, max {max(lengths):,}, "
        f"{stats.num_stopped} stopped; {stats.largest_shares}"
    )


def gap_metrics(trainer: Any, scored: dict[str, Any], *, sample: bool) -> dict[str, float]:
    """Gaps between the trainer's log-probabilities and the rollout's, in nats, over all ranks.

    Args:
        scored: The result of `_generate_and_score_completions`.
        sample: If the trainer did not compute log-probabilities, compute those of 2 rows here.

    Returns:
        Metrics by name; empty if there is nothing to compare.

    Raises:
        RolloutError: Another rank could not compute log-probabilities. If this rank could not, its
            own error is raised.
    """
    sampled, trained = scored.get("sampling_per_token_logps"), scored.get("old_per_token_logps")
    if sampled is None or (trained is None and not sample):
        return {}
    mask = scored["completion_mask"] * scored.get("tool_mask", 1)
    failure = None
    if trained is None:
        sampled, mask = sampled[:_SAMPLED_ROWS], mask[:_SAMPLED_ROWS]
        try:
            trained = _trainers_logps(trainer, scored)
        except Exception as error:  # raised after the gather, in which the other ranks wait
            trained, failure = sampled, error
    difference = (trained - sampled) * mask
    metrics = _drift(trainer, difference.abs(), mask, failure)
    if metrics and "importance_sampling_ratio" in scored:
        metrics |= _raw_ratio(trainer, difference, mask)
    return metrics


def _drift(trainer: Any, gaps: Tensor, mask: Tensor, failure: Exception | None) -> dict[str, float]:
    """Mean gap, largest gap and mean gap by position; raises if any rank failed.

    Empty if no rank has a token to compare: a gap of 0 would claim that the two sides agree.
    """
    columns = [gaps.sum(0), mask.sum(0)]
    sums = [column[first:last].sum() for column in columns for first, last in _BUCKETS.values()]
    failed = torch.full_like(gaps.max(), failure is not None)
    ranks = _gather(trainer, [*sums, gaps.max(), failed])
    *totals, _, num_failed = ranks.sum(0).tolist()
    if failure is not None:
        raise failure
    if num_failed:
        raise RolloutError(
            "log-probabilities of a rollout's first rows could not be computed on "
            f"{num_failed:.0f} other rank(s); see their errors"
        )
    distances, tokens = totals[: len(_BUCKETS)], totals[len(_BUCKETS) :]
    if not sum(tokens):
        return {}
    metrics = {
        "rollout/logp_gap": sum(distances) / sum(tokens),
        "rollout/logp_gap_max": ranks[:, -2].max().item(),
    }
    for name, distance, count in zip(_BUCKETS, distances, tokens, strict=True):
        if count:
            metrics[f"rollout/logp_gap/{name}"] = distance / count
    return metrics


def _raw_ratio(trainer: Any, difference: Tensor, mask: Tensor) -> dict[str, float]:
    """TRL's importance ratios before clipping and masking; TRL logs them only after."""
    if trainer.vllm_importance_sampling_mode.startswith("sequence"):
        difference, mask = difference.sum(1), torch.ones_like(mask[:, 0])
    ratios = difference.exp() * mask
    ranks = _gather(trainer, [ratios.sum(), mask.sum(), ratios.max()])
    total, count, _ = ranks.sum(0).tolist()
    return {
        "sampling/raw_importance_sampling_ratio/mean": total / count,
        "sampling/raw_importance_sampling_ratio/max": ranks[:, -1].max().item(),
    }


def _gather(trainer: Any, values: list[Tensor]) -> Tensor:
    """Gather one row of numbers per rank: float32 [ranks, values], on the CPU."""
    local = torch.stack([value.float() for value in values])[None]
    gathered: Tensor = trainer.accelerator.gather(local)
    return gathered.cpu()


@torch.no_grad()
def _trainers_logps(trainer: Any, scored: dict[str, Any]) -> Tensor:
    """Log-probabilities of the first rows, computed by the trainer's own method."""
    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    prompts, completions, *masks = (scored[name][:_SAMPLED_ROWS] for name in names)
    ids, mask = torch.cat([prompts, completions], dim=1), torch.cat(masks, dim=1)
    logps: Tensor
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, completions.shape[1], _SAMPLED_ROWS
    )
    return logps


def log_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Add metrics to the trainer's next log entry, for training or evaluation."""
    mode = "train" if trainer.model.training else "eval"
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)
