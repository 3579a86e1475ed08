"""Kernels that are interpreted on a CPU are compiled there too, for the GPU that they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent
MOST_SHARED = 227 * 1024  # bytes that a program can have on Hopper


def test_every_kernel_compiles_and_fits():
    command = [sys.executable, str(TESTS / "compile_kernels.py")]
    result = subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(TESTS.parent)}
    )
    assert result.returncode == 0, result.stderr
    found = [line.split() for line in result.stdout.splitlines()]
    assert max(int(shared) for _, shared in found) <= MOST_SHARED
    sources = (TESTS.parent / "rollout" / "kernels").glob("*_triton.py")
    kernels = {
        line.split("(")[0].removeprefix("def ")
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert {name for name, _ in found} == kernels
