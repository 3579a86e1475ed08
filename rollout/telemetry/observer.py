"""What `RolloutEngine.step` tells of each batch; whoever listens decides nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollout.request import Completion
from rollout.scheduler.batch import Batch


class Observer:
    """Override what you want to hear. All calls come from the host, in the order of a step."""

    def planned(self, batch: Batch | None) -> None:
        """The scheduler chose the next batch; `None` where there is nothing to launch."""

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """All work of a batch is queued on the device; `num_bytes` are uploaded for it."""

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """The tokens of a batch are on the host, and its sequences know them.

        Args:
            batch: As it was launched.
            completions: Of the sequences that it ended.
            stamps: Its `device_time.Stamps`, all of them reached. Valid during this call and the
                next one.
        """


class Observers(Observer):
    """Tells each of several.

    Args:
        recorder: Is told last, so that its own work counts to no other's times.
    """

    def __init__(self, recorder: Observer) -> None:
        self._observers = [recorder]

    @contextmanager
    def including(self, observer: Observer) -> Iterator[None]:
        """Tell `observer`, too, of what happens inside."""
        self._observers.insert(0, observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def planned(self, batch: Batch | None) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.planned(batch)

    def launched(self, batch: Batch, num_bytes: int) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.launched(batch, num_bytes)

    def settled(self, batch: Batch, completions: Sequence[Completion], stamps: Any) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.settled(batch, completions, stamps)
