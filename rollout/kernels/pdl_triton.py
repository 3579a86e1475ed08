"""Programmatic dependent launch (PDL): a kernel is launched while the one before it still ends.

A decode step runs hundreds of kernels of a few microseconds each, with a pause of about one
microsecond between two of them. PDL, on Hopper and newer, hides the pause. Such a kernel itself
waits until all kernels before it are done and their writes are visible, so results do not change.
"""

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def pdl_options() -> dict[str, bool]:
    """Launch options of a kernel that calls `gdc_wait(PDL)` first: PDL where the GPU has it."""
    supported = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"launch_pdl": supported, "PDL": supported}


@triton.jit
def gdc_wait(PDL: tl.constexpr):
    """Wait for the kernels before this one; call it before anything is read or written."""
    if PDL:
        # ORDER: the next kernel waits here for the end of this one, not for this call of it
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
