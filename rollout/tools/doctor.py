"""What the engine finds on this machine: versions, GPU, kernels, what is degraded."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

from rollout.memory.virtual_memory import why_no_virtual_memory
from rollout.telemetry.gpu_counters import open_meter
from rollout.telemetry.roofline import copy_bandwidth

_PACKAGES = (
    *("twinslot", "torch", "triton", "transformers", "trl", "accelerate", "peft", "numpy"),
    *("nvidia-ml-py", "matplotlib", "wandb"),
)


def report(console: Console) -> None:
    """Print the findings as a table.

    Args:
        console: Where to.
    """
    table = Table(title="twinslot doctor", show_header=False)
    for name, finding in (*_versions(), *_device(), *_degraded()):
        table.add_row(name, finding)
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
    yield "arena", _no_virtual_memory() or "virtual memory: addresses stay when it grows and sleeps"
    yield "driver's counters", open_meter(f"GPU-{properties.uuid}").reads
    yield "copy on the device", f"{copy_bandwidth('cuda', 'cuda') / 1e12:.2f} TB/s, read and write"
    yield "copy to the device", f"{copy_bandwidth('cpu', 'cuda') / 1e9:.1f} GB/s, pinned"


def _try_kernels() -> str:
    """Launch one kernel; what went wrong, or nothing."""
    try:
        from rollout.kernels.sample_triton import sample  # Triton is not there everywhere

        zeros = torch.zeros(1, dtype=torch.int64, device="cuda")
        sample(torch.randn(1, 100, device="cuda"), torch.ones(1, device="cuda"), zeros, zeros)
    except Exception as error:  # a missing compiler, headers, driver or package
        return f"broken: {type(error).__name__}: {error}"
    return ""


def _no_virtual_memory() -> str:
    """Why KV pages are plain tensors; nothing where they are not."""
    reason = why_no_virtual_memory(torch.device("cuda", torch.cuda.current_device()))
    return f"plain tensors: {reason}" if reason else ""


def _degraded() -> Iterator[tuple[str, str]]:
    """What is slower or missing here, and why."""
    shortcomings = list(_shortcomings())
    for shortcoming in shortcomings:
        yield "degraded", shortcoming
    if not shortcomings:
        yield "degraded", "nothing"


def _shortcomings() -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "no CUDA device: plain torch kernels, no graphs, nothing overlaps"
        return
    if broken := _try_kernels():
        yield f"Triton's kernels do not run, so rollouts on the GPU fail ({broken})"
    if reason := _no_virtual_memory():
        yield f"KV pages move when they grow and after each sleep, at the cost of graphs ({reason})"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        yield f"compute capability {major}.{minor}: no bf16 products; float16 or float32 alone"
