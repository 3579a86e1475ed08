"""Shares of the GPU's time, bandwidth and operations that a rollout used."""

from collections.abc import Sequence

import torch

from rollout.engine import RolloutEngine
from rollout.telemetry.roofline import contexts, copy_bandwidth, peak_operations
from rollout.telemetry.stats import RolloutStats


class Utilisation:
    """Compares the work that a rollout needed with the GPU's limits. No metrics on a CPU.

    gpu_busy: Seconds inside a batch (from events on the stream) / seconds of the rollout.
    mbu: `(engine_steps * weight_bytes + new_tokens * state_bytes + contexts * kv_token_bytes) /
        seconds / bandwidth`. `contexts` sums the tokens that each new token attends to. The
        bandwidth is that of a copy, read and write counted. It is measured here, before the engine
        allocates memory.
    mfu: Operations of new tokens, of distinct prompts and of their attention / seconds / dense bf16
        peak from the GPU's data sheet. Prompt tokens with KV from an earlier turn do not count.
        Absent for GPUs that `peak_operations` does not know.

    Recomputed and dropped tokens do not count. Of experts only those that a token uses count.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._bandwidth = self._peak = None
        device = engine.device
        if device.type == "cuda":
            self._bandwidth = copy_bandwidth("cuda", "cuda")
            self._peak = peak_operations(torch.cuda.get_device_name(device))

    def metrics(
        self, stats: RolloutStats, prompts: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> dict[str, float]:
        """Shares from 0 to 1, by metric name. `lengths`: new tokens of each row."""
        if not (self._bandwidth and stats.duration_s):
            return {}
        cost = self._engine.cost()  # not in __init__: training casts and shards after `attach`
        context_tokens = contexts([len(prompt) for prompt in prompts], lengths)
        moved = cost.decode_bytes(stats.engine_steps, sum(lengths), context_tokens)
        shares = {
            "rollout/gpu_busy": stats.shares.busy_s / stats.duration_s,
            "rollout/mbu": moved / self._bandwidth / stats.duration_s,
        }
        if self._peak:
            # The last token of a prompt is the input of the row's first decode step.
            needed = [len(prompt) - 1 for prompt in set(map(tuple, prompts))]
            # KV from an earlier turn makes the real numbers smaller, preemption makes them larger.
            prefilled = min(sum(needed), stats.prefilled_tokens)
            attended = min(sum(n * (n + 1) // 2 for n in needed), stats.attended_tokens)
            operations = cost.operations(sum(lengths) + prefilled, context_tokens + attended)
            shares["rollout/mfu"] = operations / self._peak / stats.duration_s
        return shares
