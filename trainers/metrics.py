"""Rollout numbers in the trainer's own logs, on the trainer's step.

TRL averages what stands in `trainer._metrics[mode]`, prefixes `eval_` in evaluation, and sends
it to W&B, TensorBoard or trackio with its other metrics.
"""

from typing import Any

from rollout.telemetry import RolloutStats


def log_rollout(trainer: Any, stats: RolloutStats) -> None:
    """Log what one rollout did.

    Args:
        trainer: The TRL trainer that asked for it.
        stats: Its counts and times.
    """
    _append(trainer, "rollout/generated_tok_s", stats.tokens_per_s)
    _append(trainer, "rollout/duration_s", stats.duration_s)
    _append(trainer, "rollout/kv_pages_used", stats.peak_pages)
    _append(trainer, "rollout/rows_live", stats.rows_live)
    _append(trainer, "rollout/policy_version", stats.policy_version)


def log_logp_gap(trainer: Any, scored: dict[str, Any]) -> None:
    """Log how far the trainer's log-probabilities are from the rollout's, if it computed them.

    Args:
        trainer: The TRL trainer.
        scored: What `_generate_and_score_completions` returned.
    """
    trained, sampled = scored.get("old_per_token_logps"), scored.get("sampling_per_token_logps")
    if trained is None or sampled is None:
        return
    mask = scored["completion_mask"] * scored.get("tool_mask", 1)
    gap = ((trained - sampled).abs() * mask).sum() / mask.sum().clamp(min=1)
    _append(trainer, "rollout/logp_gap", gap.item())


def _append(trainer: Any, name: str, value: float) -> None:
    mode = "train" if trainer.model.training else "eval"
    trainer._metrics[mode][name].append(value)
