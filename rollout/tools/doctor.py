"""What the engine finds on this machine: versions, GPU, kernels, and what works less well."""

import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from rollout.config import EngineConfig
from rollout.engine import RolloutEngine
from rollout.memory.virtual_memory import why_no_virtual_memory
from rollout.telemetry.gpu_counters import open_meter
from rollout.telemetry.roofline import copy_bandwidth
from rollout.tools.workload import build_model

_PACKAGES = (
    *("twinslot", "torch", "triton", "transformers", "trl", "accelerate", "peft", "numpy"),
    *("nvidia-ml-py", "matplotlib", "wandb"),
)


def report(console: Console) -> None:
    """Print the findings as a table."""
    table = Table(title="twinslot doctor", show_header=False)
    for name, finding in (*_versions(), *_device()):
        table.add_row(name, finding)
    for finding in list(_shortcomings()) or ["nothing"]:
        table.add_row("degraded", finding)
    console.print(table)


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            yield package, "not installed"


def _device() -> Iterator[tuple[str, str]]:
    if not torch.cuda.is_available():
        yield "device", f"CPU, {torch.get_num_threads()} threads"
        yield "kernels", "plain torch"
        yield "arena", "plain tensors"
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield "device", f"{torch.cuda.device_count()} x {properties.name}"
    yield "compute capability", f"{properties.major}.{properties.minor}, CUDA {torch.version.cuda}"
    yield "memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield "kernels", _try_kernels() or "Triton: KV store, paged attention, sampling"
    yield "arena", _no_virtual_memory() or "virtual memory: pages keep their addresses"
    yield "driver's counters", open_meter(f"GPU-{properties.uuid}").reads
    yield "copy on the device", f"{copy_bandwidth('cuda', 'cuda') / 1e12:.2f} TB/s, read and write"
    yield "copy to the device", f"{copy_bandwidth('cpu', 'cuda') / 1e9:.1f} GB/s, pinned"
    yield "engine start, 0.6B shape", _start()


def _try_kernels() -> str:
    """Launch one kernel; return what went wrong, or an empty string."""
    try:
        from rollout.kernels.sample_triton import sample  # Triton may be missing

        zeros = torch.zeros(1, dtype=torch.int64, device="cuda")
        sample(torch.randn(1, 100, device="cuda"), torch.ones(1, device="cuda"), zeros, zeros)
    except Exception as error:  # a missing compiler, headers, driver or package
        return f"broken: {type(error).__name__}: {error}"
    return ""


def _start() -> str:
    """Time the opening of an engine, once the GPU has loaded the kernels; or say what failed."""
    try:
        model = build_model("qwen3-0.6b", torch.device("cuda"))
        for _ in range(2):
            began = time.perf_counter()
            RolloutEngine(model, EngineConfig(max_rows=1)).close()
    except Exception as error:  # kernels may be broken, or memory short
        return f"failed: {type(error).__name__}: {error}"
    return f"{time.perf_counter() - began:.2f} s, self-check included"


def _no_virtual_memory() -> str:
    """Why KV pages are plain tensors; empty if they are not."""
    reason = why_no_virtual_memory(torch.device("cuda", torch.cuda.current_device()))
    return f"plain tensors: {reason}" if reason else ""


def _shortcomings() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "no CUDA device: rollouts use plain torch, without CUDA graphs or overlap"
        return
    if broken := _try_kernels():
        yield f"Triton kernels do not run, so rollouts on the GPU fail ({broken})"
    if reason := _no_virtual_memory():
        yield f"KV pages move on growth and after a sleep: graphs are captured again ({reason})"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        yield f"compute capability {major}.{minor} has no bf16: use float16 or float32"
