"""Preemption: if pages run out, the youngest rows give up their lanes to older ones."""

import numpy as np

from rollout.request import Ints
from rollout.scheduler.batch import Plan
from rollout.scheduler.host_pages import HostPages
from rollout.scheduler.lanes import LaneTable
from rollout.scheduler.pages import pages_for
from rollout.scheduler.waiting import WaitingQueue


class Preemption:
    """Preempts rows. They wait in front of all others and continue where they stopped.

    A row's KV is offloaded to the host. If the host has no room, or the prompt was not yet
    prefilled, the KV is recomputed later. Every row finishes: the oldest row is never preempted,
    and one row alone always fits.
    """

    def __init__(
        self, lanes: LaneTable, waiting: WaitingQueue, host_pages: HostPages, page_tokens: int
    ) -> None:
        self._lanes, self._waiting, self._host_pages = lanes, waiting, host_pages
        self._page_tokens = page_tokens

    def make_room(self, growing: Ints, policy_version: int, plan: Plan) -> Ints:
        """Preempt young rows to give the older of the `growing` lanes a page each.

        Returns the lanes that can have one. If a row finds no page and is the youngest of all, it
        keeps its lane and waits.
        """
        served = list[int]()
        for lane in growing[np.argsort(self._lanes.age[growing])].tolist():
            if lane not in self._lanes.rows:
                break  # this lane was preempted below, and so were all younger ones
            while len(served) >= self._lanes.pages.num_free:
                youngest = self._lanes.youngest()
                if youngest == lane:
                    return np.array(served, np.int64)
                self._preempt(youngest, policy_version, plan)
            served.append(lane)
        return np.array(served, np.int64)

    def recompute(self) -> None:
        """Preempt every row and discard its KV, so that it is computed again."""
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
            # ORDER: the batch in flight writes its KV before the offload copies it
            offload = self._host_pages.offload(self._lanes.pages_of(lane)[:num_pages])
        row = self._lanes.leave(lane)
        if offload is not None:
            row.host_pages = offload.host_pages
            # The last pages are reallocated first, so copy them first.
            plan.offloads += reversed(offload.copies)
        self._waiting.put_back(row)
