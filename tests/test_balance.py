"""Balancing rows between ranks, simulated with drawn completion lengths.

`pytest tests/test_balance.py -s` prints the figures of `examples/README.md`.
"""

import numpy as np
import pytest

from trainers.adapter.ranks import Group, deal

# Qwen3-1.7B on an H200, measured by `measure_ranks.py`: seconds of a step without reading KV, and
# of reading a token's KV (112 KiB at 4.1 TB/s).
STEP_S, CONTEXT_S = 2.2e-3, 28e-9
MOST, GROUP = 8192, 8


def drawn(rng, medians, spread):
    """Completion lengths of a rollout, (prompts, GROUP)."""
    lengths = medians[:, None] * np.exp(rng.normal(0, spread, (len(medians), GROUP)))
    return np.clip(lengths, 1, MOST).astype(int)


def seconds(lengths):
    """A rank's time for these rows: the steps of the longest row, plus reading all contexts."""
    return STEP_S * lengths.max() + CONTEXT_S * (lengths.astype(float) ** 2).sum() / 2


def speedups(median, spread, num_ranks, num_prompts=16, num_drawings=100):
    """Speedup over one GPU that does all rows, without and with balancing."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(num_drawings):
        medians = median * np.exp(rng.normal(0, 0.7, num_ranks * num_prompts))
        before, lengths = drawn(rng, medians, spread), drawn(rng, medians, spread)
        groups = [
            Group(index // num_prompts, index, [index], [0] * GROUP, float(mean))
            for index, mean in enumerate(before.mean(axis=1))
        ]
        own = [seconds(part) for part in np.split(lengths, num_ranks)]
        dealt = [
            seconds(lengths[[g.first for g in part]]) if part else 0
            for part in deal(groups, num_ranks)
        ]
        ratios.append([sum(own) / max(own), sum(own) / max(dealt)])
    return np.mean(ratios, axis=0)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize(("median", "spread"), [(1500, 0.4), (3000, 0.4), (3000, 0.8)])
def test_rows_shared_out_by_earlier_lengths_end_together(median, spread, num_ranks):
    own, dealt = speedups(median, spread, num_ranks)
    what = f"median {median}, spread {spread}, {num_ranks} GPUs"
    print(f"\n{what}: {own:.2f} x, shared out {dealt:.2f} x")  # noqa: T201
    assert dealt > own
    assert dealt > 0.88 * num_ranks
