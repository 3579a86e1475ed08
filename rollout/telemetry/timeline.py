"""What ran when on host and device, as shares and as a picture."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError

TRACKS = ("host", "h2d", "compute", "d2h")
PREFILL, WAIT = "prefill", "wait"
_IDLE = "#d62728"
_COLORS = {"host": "#4c72b0", "h2d": "#55a868", "compute": "#8172b3", "d2h": "#ccb974"}


@dataclass(frozen=True)
class Interval:
    """One thing that ran.

    Attributes:
        track: One of `TRACKS`.
        start_s: Seconds on the host's clock, as is `stop_s`.
        num_rows: Rows that decoded, if it is a batch.
    """

    track: str
    name: str
    start_s: float
    stop_s: float
    num_rows: int = 0


@dataclass
class Timeline:
    """Intervals of one rollout, in the order in which they were recorded."""

    intervals: list[Interval] = field(default_factory=list)

    def on(self, track: str) -> list[Interval]:
        """A track's intervals by start, without the host's waits, which are no work."""
        intervals = [i for i in self.intervals if i.track == track and i.name != WAIT]
        return sorted(intervals, key=lambda interval: interval.start_s)

    def gaps(self, track: str) -> list[tuple[float, float]]:
        """Start and end of each idle stretch between a track's first interval and its last."""
        gaps: list[tuple[float, float]] = []
        reached = float("inf")
        for interval in self.on(track):
            if interval.start_s > reached:
                gaps.append((reached, interval.start_s))
            reached = interval.stop_s if reached == float("inf") else max(reached, interval.stop_s)
        return gaps

    def span_s(self, track: str) -> float:
        """Seconds from a track's first interval to the end of its last."""
        intervals = self.on(track)
        last = max((interval.stop_s for interval in intervals), default=0.0)
        return last - intervals[0].start_s if intervals else 0.0

    def busy_s(self, track: str) -> float:
        """Seconds in which a track ran."""
        return self.span_s(track) - sum(stop - start for start, stop in self.gaps(track))

    def busy_share(self, track: str) -> float:
        """`busy_s / span_s`; `nan` if the track is empty."""
        span_s = self.span_s(track)
        return self.busy_s(track) / span_s if span_s else float("nan")

    def decoding(self) -> "Timeline":
        """The intervals that began after the last prefill."""
        prefills = [i.stop_s for i in self.intervals if i.name == PREFILL]
        began = max(prefills, default=0.0)
        return Timeline([i for i in self.intervals if i.start_s >= began])

    def middle(self, seconds: float) -> "Timeline":
        """The middle `seconds` of the rollout; intervals that reach beyond are cut."""
        starts = [interval.start_s for interval in self.intervals]
        first = (min(starts) + max(starts) - seconds) / 2
        last = first + seconds
        kept = [i for i in self.intervals if i.stop_s > first and i.start_s < last]
        spans = [(max(i.start_s, first), min(i.stop_s, last)) for i in kept]
        return Timeline(
            [replace(i, start_s=a, stop_s=b) for i, (a, b) in zip(kept, spans, strict=True)]
        )


def middle_steps(timeline: Timeline, count: int = 8) -> Timeline:
    """About `count` steps from the middle: one takes 5 ms on a GPU, 100 ms on a CPU."""
    steps = len(timeline.on("compute"))
    return timeline.middle(count * timeline.span_s("compute") / steps) if steps else timeline


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """JSON for Perfetto and Chrome's `about:tracing`, in microseconds from the start."""
    origin = min((interval.start_s for interval in timeline.intervals), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
        for track, name in enumerate(TRACKS, start=1)  # Perfetto shows 0 as the idle process
    ]
    for interval in timeline.intervals:
        events.append(
            {
                "ph": "X",
                "name": interval.name,
                "pid": 1,
                "tid": 1 + TRACKS.index(interval.track),
                "ts": (interval.start_s - origin) * 1e6,
                "dur": (interval.stop_s - interval.start_s) * 1e6,
                "args": {"rows": interval.num_rows} if interval.track == "compute" else {},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def open_pyplot() -> Any:
    """Import pyplot for drawing to files; `ConfigError` if matplotlib is not installed."""
    try:
        import matplotlib  # rollouts do not need it
    except ImportError as error:
        raise ConfigError("drawing a timeline needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw timelines by title on one scale, with idle device time in red; needs matplotlib."""
    pyplot = open_pyplot()
    size = (12, 2.2 * len(timelines))
    figure, axes = pyplot.subplots(len(timelines), sharex=True, squeeze=False, figsize=size)
    for axis, (title, timeline) in zip(axes[:, 0], timelines.items(), strict=True):
        origin = min((interval.start_s for interval in timeline.intervals), default=0.0)

        def bars(spans: Iterable[tuple[float, float]], origin: float = origin) -> list[Any]:
            return [((start - origin) * 1e3, (stop - start) * 1e3) for start, stop in spans]

        for height, track in enumerate(reversed(TRACKS)):
            spans = ((interval.start_s, interval.stop_s) for interval in timeline.on(track))
            axis.broken_barh(bars(spans), (height + 0.1, 0.8), color=_COLORS[track])
            if track == "compute":
                axis.broken_barh(bars(timeline.gaps(track)), (height + 0.1, 0.8), color=_IDLE)
        axis.set_yticks([height + 0.5 for height in range(len(TRACKS))], TRACKS[::-1])
        busy = f"device busy {timeline.busy_share('compute'):.1%}, idle in red"
        axis.set_title(f"{title}: {busy}", loc="left")
    figure.axes[-1].set_xlabel("ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
