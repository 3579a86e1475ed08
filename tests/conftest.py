"""What every test runs under: no network, one thread, and a GPU only if a marker asks for one."""

import gc
import os
import sys
from collections import Counter

# The libraries read these at import, so set them first.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from hypothesis import settings

from rollout.scheduler.waiting import Lengths

torch.set_num_threads(1)  # pytest-xdist runs one process per core
if not torch.cuda.is_available():
    # Run Triton kernels in its CPU interpreter. Triton reads this when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start slow and large files first, so that no worker ends with one of them alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))


def pytest_collection_finish() -> None:
    """Freeze the garbage collector's view of all imported modules.

    Every `train()` collects garbage. Scanning torch, transformers and TRL took a third of a short
    `train()`.
    """
    gc.collect()
    gc.freeze()


NUM_GPUS = {"gpu": 1, "multigpu": 2}  # marker -> CUDA devices needed


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that lacks GPUs; fail it if ROLLOUT_REQUIRE_GPU, a number of GPUs, covers it.

    Without ROLLOUT_REQUIRE_GPU, a GPU run that skips every test would pass.
    """
    needed = max((n for mark, n in NUM_GPUS.items() if item.get_closest_marker(mark)), default=0)
    if needed == 0:
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found >= needed:
        return
    message = f"needs {needed} CUDA device(s), {found} found"
    required = int(os.environ.get("ROLLOUT_REQUIRE_GPU") or "0")
    if required >= needed:
        pytest.fail(f"{message}, and ROLLOUT_REQUIRE_GPU={required}", pytrace=False)
    pytest.skip(message)


@pytest.fixture(autouse=True, scope="module")
def a_new_accelerate():
    """Reset accelerate before each file.

    accelerate keeps the last trainer's precision and device for the rest of the process.
    """
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def no_memory_of_lengths(monkeypatch):
    """Admit rows in the same order each time, so that results are bit-identical."""
    monkeypatch.setattr(Lengths, "note", lambda *_: None)
