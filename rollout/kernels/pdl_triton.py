"""Kernels that are launched while the one before them ends, on Hopper and newer.

NVIDIA calls it programmatic dependent launch. Hundreds of kernels a step last microseconds each,
and the pause between two of them about one. A kernel so launched waits by itself until all before
it are done and their writes are seen, so results are those of a launch in order.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def early() -> dict[str, bool]:
    """Arguments of a launch: whether it may begin early, for the launcher and for `follow`."""
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"launch_pdl": can, "EARLY": can}


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait for the kernels before this one; to be called before anything is read or written."""
    if EARLY:
        # ORDER: the next kernel waits here for the end of this one, not for this call of it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
