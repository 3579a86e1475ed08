"""What share of a GPU's time, of its bandwidth and of its operations a rollout has used."""

from collections.abc import Sequence

import torch

from rollout.engine import RolloutEngine
from rollout.telemetry.roofline import contexts, copy_bandwidth, peak_operations
from rollout.telemetry.stats import RolloutStats


class Utilisation:
    """What a rollout kept the GPU busy with, over what the GPU could have done.

    gpu_busy: Seconds in which it was inside a batch, by events on its stream, over the rollout's.
    mbu: `engine_steps * weight_bytes + contexts * kv_token_bytes` over the rollout's seconds and
        the bandwidth of a copy on this GPU, read and write counted, which is measured once, when
        this is made: before the engine has taken its memory. `contexts` are the tokens that each
        new token attends to, summed.
    mfu: `token_operations` of every new token and of each different prompt's, but for those whose
        KV an earlier turn has left, and the operations of their attention, over the seconds and the
        GPU's dense bf16 peak by its data sheet. There is none for a GPU that
        `cost.peak_operations` does not know.

    What was computed twice or for nothing does not count, nor do experts that a token is not sent
    to. On a CPU there are none of them.

    Args:
        engine: The engine, which has not run yet.
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
        """Shares of one rollout, from 0 to 1, by name.

        Args:
            stats: Its counts and times.
            prompts: Token ids of each row.
            lengths: New tokens of each row.
        """
        if not (self._bandwidth and stats.duration_s):
            return {}
        cost = self._engine.cost()  # now: training casts and shards after `attach`
        read = contexts([len(prompt) for prompt in prompts], lengths)
        moved = cost.decode_bytes(stats.engine_steps, read)
        shares = {
            "rollout/gpu_busy": stats.shares.busy_s / stats.duration_s,
            "rollout/mbu": moved / self._bandwidth / stats.duration_s,
        }
        if self._peak:
            # The last token of a prompt is the input of the row's first decode step.
            wanted = [len(prompt) - 1 for prompt in set(map(tuple, prompts))]
            # Less was run where an earlier turn has left KV, and more where rows were preempted.
            prefilled = min(sum(wanted), stats.prefilled_tokens)
            attended = min(sum(n * (n + 1) // 2 for n in wanted), stats.attended_tokens)
            ran = cost.operations(sum(lengths) + prefilled, read + attended)
            shares["rollout/mfu"] = ran / self._peak / stats.duration_s
        return shares
