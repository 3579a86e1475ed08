"""Rollout numbers in the trainer's own logs, on the trainer's step.

TRL averages what stands in `trainer._metrics[mode]`, prefixes `eval_` in evaluation, and sends
it to W&B, TensorBoard or trackio with its other metrics.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.errors import RolloutError
from rollout.telemetry.stats import RolloutStats

_SAMPLED_ROWS = 2
# Positions in a completion: drift grows with them, and a mean over all would not show where.
_BUCKETS = {"0-1K": (0, 1024), "1-4K": (1024, 4096), "4-16K": (4096, 16384), "16K+": (16384, None)}


def rollout_metrics(stats: RolloutStats) -> dict[str, float]:
    """What one rollout did. Pages are those of its tightest moment.

    Args:
        stats: Its counts and times.

    Returns:
        Metrics by name: tokens and rows as counts, `finished/` as shares of the rows.
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
    """Where a rollout's time went, as shares that add up to 1; `TimeShares` defines them."""
    return {f"rollout/time/{part}": share for part, share in stats.time_shares.items()}


def summary(stats: RolloutStats) -> str:
    """One line: rows, tokens, seconds, tokens/s, lengths, and where the time went."""
    lengths = stats.lengths or [0]
    return (
        f"rollout: {len(stats.lengths)} rows, {stats.generated_tokens:,} tokens, "
        f"{stats.duration_s:.1f} s, {stats.tokens_per_s:,.0f} tok/s; "
        f"mean length {np.mean(lengths):,.0f}, max {max(lengths):,}, "
        f"{stats.num_stopped} stopped; {stats.largest_shares}"
    )


def gap_metrics(trainer: Any, scored: dict[str, Any], *, sample: bool) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the rollout's, over all ranks.

    Args:
        trainer: The TRL trainer.
        scored: What `_generate_and_score_completions` returned.
        sample: Where the trainer has not computed its own, compute those of a few rows.

    Returns:
        Metrics by name; none where there is nothing to compare.

    Raises:
        RolloutError: Another rank could not compute those of its rows. What this one met, if it
            could not.
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
        except Exception as error:  # of this rank alone, perhaps: the others wait for its numbers
            trained, failure = sampled, error
    difference = (trained - sampled) * mask
    metrics = _drift(trainer, difference.abs(), mask, failure)
    if metrics and "importance_sampling_ratio" in scored:
        metrics |= _raw_ratio(trainer, difference, mask)
    return metrics


def _drift(trainer: Any, gaps: Tensor, mask: Tensor, failure: Exception | None) -> dict[str, float]:
    """Mean and largest distance, and the mean by position; raises if any rank has failed.

    Where no rank has a token that counts there are none: 0 would say that all of them agree.
    """
    columns = [gaps.sum(0), mask.sum(0)]
    sums = [column[first:last].sum() for column in columns for first, last in _BUCKETS.values()]
    failed = torch.full_like(gaps.max(), failure is not None)
    ranks = _gather(trainer, [*sums, gaps.max(), failed])
    *totals, _, num_failed = ranks.sum(0).tolist()
    _check_computed(failure, num_failed)
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


def _check_computed(failure: Exception | None, num_failed: float) -> None:
    if failure is not None:
        raise failure
    if num_failed:
        raise RolloutError(
            "log-probabilities of a rollout's first rows could not be computed on "
            f"{num_failed:.0f} other rank(s); see their errors"
        )


def _raw_ratio(trainer: Any, difference: Tensor, mask: Tensor) -> dict[str, float]:
    """TRL's importance ratios before it clips or masks them: its own metrics show them after."""
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
    """A row of numbers from each rank."""
    local = torch.stack([value.float() for value in values])[None]
    gathered: Tensor = trainer.accelerator.gather(local)
    return gathered.cpu()


@torch.no_grad()
def _trainers_logps(trainer: Any, scored: dict[str, Any]) -> Tensor:
    """The trainer's own log-probabilities of the first rows, by its own method."""
    names = ("prompt_ids", "completion_ids", "prompt_mask", "completion_mask")
    prompts, completions, *masks = (scored[name][:_SAMPLED_ROWS] for name in names)
    ids, mask = torch.cat([prompts, completions], dim=1), torch.cat(masks, dim=1)
    logps: Tensor
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, completions.shape[1], _SAMPLED_ROWS
    )
    return logps


def log_metrics(trainer: Any, metrics: dict[str, float]) -> None:
    """Log numbers with the trainer's next ones, as training's or evaluation's.

    Args:
        trainer: The TRL trainer.
        metrics: Metrics by name.
    """
    mode = "train" if trainer.model.training else "eval"
    for name, value in metrics.items():
        trainer._metrics[mode][name].append(value)
