"""What every test runs under: no network, one thread, and a GPU only where one is asked for."""

import gc
import os
import sys
from collections import Counter

# Read by the libraries when they are imported, so before anything else is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from hypothesis import settings

from rollout.scheduler.waiting import Lengths

torch.set_num_threads(1)  # tests run beside each other, one process a core
if not torch.cuda.is_available():
    # Triton kernels then run in its interpreter, on the CPU. Read when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, then those with many: none is left to one worker's end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))


def pytest_collection_finish() -> None:
    """Let garbage collection pass over all that was imported.

    Every `train()` collects garbage, and to look through the objects of torch, transformers and
    TRL took a third of a short one.
    """
    gc.collect()
    gc.freeze()


NUM_GPUS = {"gpu": 1, "multigpu": 2}  # marker -> CUDA devices that the test needs


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose GPUs are not there, or fail it where ROLLOUT_REQUIRE_GPU promised them.

    ROLLOUT_REQUIRE_GPU is the number of GPUs that have to be there: a GPU run must not be green
    because it skipped everything.
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
    """Each file starts with accelerate as imported, whichever file the worker ran before.

    accelerate keeps the last trainer's precision and device for the process, and any
    `Accelerator` that names none has those.
    """
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def no_memory_of_lengths(monkeypatch):
    """The same rows are admitted in the same order each time, so that equal is to the last bit."""
    monkeypatch.setattr(Lengths, "note", lambda *_: None)
