"""Programmatic dependent launch (PDL): the next kernel starts to launch while this one ends.

A decode step runs hundreds of kernels of a few microseconds, about one microsecond apart. PDL, on
Hopper and newer, hides that pause. Each kernel still waits until all kernels before it are done
and their writes are visible, so results do not change.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def pdl_options() -> dict[str, bool]:
    """Launch options for a kernel that calls `gdc_wait(PDL)` first; PDL is off before Hopper."""
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"launch_pdl": supported, "PDL": supported}


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait for all earlier kernels; call it before any read or write."""
    if PDL:
        # ORDER: the next kernel's own wait lasts until this kernel ends, so launch it early
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
