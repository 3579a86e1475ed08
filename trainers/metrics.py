"""Rollout numbers in the trainer's own logs, on the trainer's step.

TRL averages what stands in `trainer._metrics[mode]`, prefixes `eval_` in evaluation, and sends
it to W&B, TensorBoard or trackio with its other metrics.
"""

from typing import Any

import torch
from torch import Tensor

from rollout.telemetry import RolloutStats

_SAMPLED_ROWS = 2


def log_rollout(trainer: Any, stats: RolloutStats) -> None:
    """Log what one rollout did. Pages are those of its tightest moment.

    Args:
        trainer: The TRL trainer that asked for it.
        stats: Its counts and times.
    """
    _append(trainer, "rollout/generated_tok_s", stats.tokens_per_s)
    _append(trainer, "rollout/duration_s", stats.duration_s)
    _append(trainer, "rollout/kv_pages_used", stats.peak_pages)
    _append(trainer, "rollout/kv_pages_shared", stats.peak_shared_pages)
    _append(trainer, "rollout/kv_pages_free", stats.least_free_pages or 0)
    _append(trainer, "rollout/preemptions", stats.preemptions)
    _append(trainer, "rollout/offloaded_gib", stats.offloaded_bytes / 2**30)
    _append(trainer, "rollout/rows_live", stats.rows_live)
    _append(trainer, "rollout/prefix_hit_rate", stats.prefix_hit_rate)
    _append(trainer, "rollout/policy_version", stats.policy_version)
    _append(trainer, "rollout/kv_mapped_gib", stats.mapped_bytes / 2**30)
    _append(trainer, "rollout/released_gib", stats.released_bytes / 2**30)
    _append(trainer, "rollout/wake_ms", stats.wake_s * 1e3)
    for name, share in stats.device.items():
        _append(trainer, f"rollout/{name}", share)


def log_sleep(trainer: Any, stats: RolloutStats) -> None:
    """Log how long it took to give the memory back after a rollout.

    Args:
        trainer: The TRL trainer that asked for it.
        stats: Its counts and times.
    """
    _append(trainer, "rollout/sleep_ms", stats.sleep_s * 1e3)


def logp_gaps(trainer: Any, scored: dict[str, Any], *, sample: bool) -> tuple[float, float] | None:
    """How far the trainer's log-probabilities are from the rollout's.

    Args:
        trainer: The TRL trainer.
        scored: What `_generate_and_score_completions` returned.
        sample: Where the trainer has not computed its own, compute those of a few rows.

    Returns:
        Mean and largest distance, or `None` where there is nothing to compare.
    """
    sampled, trained = scored.get("sampling_per_token_logps"), scored.get("old_per_token_logps")
    if sampled is None or (trained is None and not sample):
        return None
    mask = scored["completion_mask"] * scored.get("tool_mask", 1)
    if trained is None:
        sampled, mask = sampled[:_SAMPLED_ROWS], mask[:_SAMPLED_ROWS]
        trained = _trainers_logps(trainer, scored)
    gaps = (trained - sampled).abs() * mask
    return (gaps.sum() / mask.sum().clamp(min=1)).item(), gaps.max().item()


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


def log_gap(trainer: Any, mean: float, largest: float) -> None:
    """Log the distances that `logp_gaps` found.

    Args:
        trainer: The TRL trainer.
        mean: Over the tokens.
        largest: Of a token.
    """
    _append(trainer, "rollout/logp_gap", mean)
    _append(trainer, "rollout/logp_gap_max", largest)


def _append(trainer: Any, name: str, value: float) -> None:
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode][name].append(value)
