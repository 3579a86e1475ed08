"""What `RolloutEngine.step` reports of each batch. Observers change nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.request import Completion
from rollout.scheduler.batch import Batch


class Observer:
    """Override the events you need. The host calls them in the order of a step."""

    def planned(self, batch: Batch | None) -> None:
        """The scheduler chose the next batch; `None` if there is nothing to launch."""

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """All work of a batch is queued on the device; `num_bytes` are uploaded for it."""

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """The scheduler has processed a batch's tokens.

        `completions` are of the sequences that it ended. `stamps` is its `device_time.Stamps`, all
        reached, valid during this call and the next.
        """


class Observers(Observer):
    """Forwards to several observers; `recorder` comes last, so nobody times its work."""

    def __init__(self, recorder: Observer) -> None:
        self._observers = [recorder]

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """Forward to `observer`, too, inside the context."""
        self._observers.insert(0, observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def planned(self, batch: Batch | None) -> None:
        """Forward to each."""
        for observer in self._observers:
            observer.planned(batch)

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Forward to each."""
        for observer in self._observers:
            observer.launched(batch, num_bytes)

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """Forward to each."""
        for observer in self._observers:
            observer.settled(batch, completions, stamps)
