"""Kernels also compile for the GPU on a machine without one."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent
MOST_SHARED = 227 * 1024  # bytes per program on Hopper


def compiled(*arguments):
    command = [sys.executable, str(TESTS / "compile_kernels.py"), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(TESTS.parent)}
    )
    assert result.returncode == 0, result.stderr
    return [line.split() for line in result.stdout.splitlines()]


def test_every_kernel_compiles_and_fits():
    launches = compiled()
    assert max(int(shared) for _, shared, _ in launches) <= MOST_SHARED
    sources = (TESTS.parent / "rollout" / "kernels").rglob("*_triton.py")
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert {name for name, _, _ in launches} == kernels


def test_the_number_of_rows_costs_no_compilation():
    """A user would wait for each before the first token."""
    kinds = {(name, kind) for name, _, kind in compiled("decode")}
    assert Counter(name for name, _ in kinds) == {
        "_skinny_linear_kernel": 2,  # up to 16 rows, and up to 32
        "_rms_norm_kernel": 2,  # of hidden states, and of heads
        "_decode_kernel": 2,  # with and without splits
        "_merge_splits_kernel": 1,
        "_chunk_kernel": 1,
        "_row_kernel": 1,
    }
