"""Takes the lanes of the youngest rows when older ones find no page, and saves their KV."""

import numpy as np

from rollout.request import Ints
from rollout.scheduler.batch import Plan
from rollout.scheduler.host_pages import HostPages
from rollout.scheduler.lanes import LaneTable
from rollout.scheduler.pages import pages_for
from rollout.scheduler.waiting import WaitingQueue


class Preemption:
    """Preempted rows wait in front of all others, and go on where they were.

    The KV of such a row is offloaded to the host; where that has no room, or the row's prompt was
    not yet prefilled, it is computed again. The oldest row is never preempted, and one row alone
    always has room, so every row becomes the oldest or ends before.

    Args:
        lanes: Where rows run.
        waiting: Where they wait.
        host_pages: Where their KV is offloaded to.
        page_tokens: Tokens in a page.
    """

    def __init__(
        self, lanes: LaneTable, waiting: WaitingQueue, host_pages: HostPages, page_tokens: int
    ) -> None:
        self._lanes, self._waiting, self._host_pages = lanes, waiting, host_pages
        self._page_tokens = page_tokens

    def make_room(self, growing: Ints, policy_version: int, plan: Plan) -> Ints:
        """Preempt rows until the older ones among `growing` lanes can have a page each.

        Returns:
            Those lanes. A row that finds no page though it is the youngest keeps its lane, and
            waits there for one.
        """
        served = list[int]()
        for lane in growing[np.argsort(self._lanes.age[growing])].tolist():
            if lane not in self._lanes.rows:
                break  # preempted below, as are all after it
            while len(served) >= self._lanes.pages.num_free:
                youngest = self._lanes.youngest()
                if youngest == lane:
                    return np.array(served, np.int64)
                self._preempt(youngest, policy_version, plan)
            served.append(lane)
        return np.array(served, np.int64)

    def recompute(self) -> None:
        """Preempt every row, and let its KV be computed again."""
        for row in self._waiting:
            self._host_pages.free(row.host_pages)
            row.host_pages = []
        for lane in list(self._lanes.rows):
            self._waiting.put_back(self._lanes.leave(lane))

    def _preempt(self, lane: int, policy_version: int, plan: Plan) -> None:
        plan.num_preempted += 1
        offload = None
        if self._lanes.prefill_queue.is_ready(lane):
            self._lanes.enter_prefixes(lane, policy_version)
            num_pages = pages_for(int(self._lanes.position[lane]), self._page_tokens)
            # ORDER: a token in flight writes its KV before anything is copied off the device
            offload = self._host_pages.offload(self._lanes.pages_of(lane)[:num_pages])
        row = self._lanes.leave(lane)
        if offload is not None:
            row.host_pages = offload.host_pages
            # The last pages are handed out first, so their next rows wait for few copies.
            plan.offloads += reversed(offload.copies)
        self._waiting.put_back(row)
