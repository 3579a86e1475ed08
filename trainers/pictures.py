"""Pictures of one rollout beside its timeline: rows and speed as it went, and its lengths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.timeline import Timeline, open_pyplot

_BINS = 100


def draw_progress(timeline: Timeline, path: Path) -> None:
    """Draw how many rows were live, and tokens a second, over a rollout.

    Args:
        timeline: Of the whole rollout.
        path: Picture to write.
    """
    batches = timeline.on("compute")
    rows = np.array([batch.num_rows for batch in batches])
    stops = np.array([batch.stop_s for batch in batches]) - batches[0].start_s
    # Several steps a bin: in fewer, whole tokens would beat against its edges.
    num_bins = max(1, min(_BINS, len(batches) // 10))
    tokens, edges = np.histogram(stops, num_bins, (0, stops.max()), weights=rows)
    pyplot = open_pyplot()
    figure, (live, speed) = pyplot.subplots(2, sharex=True, figsize=(12, 5))
    live.step(stops, rows, where="pre")
    live.set_ylabel("rows live")
    speed.stairs(tokens / np.diff(edges), edges)
    speed.set_ylabel("tokens/s")
    speed.set_xlabel("s")
    for axis in (live, speed):
        axis.set_ylim(bottom=0)
    _save(figure, path)


def draw_lengths(lengths: Sequence[int], path: Path) -> None:
    """Draw how many completions have how many tokens.

    Args:
        lengths: Tokens of each completion.
        path: Picture to write.
    """
    figure, axis = open_pyplot().subplots(figsize=(8, 4))
    width = 1 + max(lengths) // _BINS  # whole tokens: no bin has one length more than the next
    axis.hist(lengths, np.arange(0, max(lengths) + width + 1, width) - 0.5)
    axis.set_xlabel("tokens of a completion")
    axis.set_ylabel("completions")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    open_pyplot().close(figure)
