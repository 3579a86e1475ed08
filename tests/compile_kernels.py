"""Compiles the Triton kernels for Hopper on a machine that has no GPU.

A process of its own: Triton's interpreter, which tests use there, is chosen when it is imported.
Prints a line a launch: the kernel's name, the bytes of shared memory that a program of it takes,
and the hash of what was compiled. With the argument `decode` it launches what decode steps of
different sizes do, otherwise every kernel.
"""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rollout.kernels import pdl_triton


class Hopper:
    """As much of a driver as a compiler asks."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_alone():
    """From now on launching a kernel compiles it, to machine code, and that is all."""
    triton.runtime.driver.set_active(Hopper())
    pdl_triton.pdl_options = lambda: {"launch_pdl": True, "PDL": True}
    run = JITFunction.run

    def compiled(kernel, *args, warmup, **options):
        found = run(kernel, *args, warmup=True, **options)
        assert found.asm["cubin"]
        sys.stdout.write(f"{kernel.__name__} {found.metadata.shared} {found.hash}\n")

    JITFunction.run = compiled


def attend(dtype, heads, kv_heads, dim, page_tokens, **options):
    """Kernels that read and write KV pages."""
    from rollout.kernels import paged_attention_triton, store_kv_triton

    query = torch.zeros(4, heads, dim, dtype=dtype)
    new = tuple(torch.zeros(4, kv_heads, dim, dtype=dtype) for _ in range(2))
    cache = tuple(torch.zeros(3, page_tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
    table, lanes = torch.zeros(4, 9, dtype=torch.int64), torch.arange(4)
    where = (table, lanes, lanes)
    store_kv_triton.store_kv(*new, cache, *where)
    how = {"scale": 0.1, **options}
    paged_attention_triton.decode(query, cache, *where, max_context=9000, **how)
    runs = torch.zeros(2, 4, dtype=torch.int64)
    for keys, pages in ((cache, table), (new, None)):
        paged_attention_triton.attend_runs(
            query, keys, runs, longest=4, page_table_LP=pages, with_lse=pages is None, **how
        )


def draw():
    """Kernels that read logits."""
    from rollout.kernels import sample_triton
    from rollout.kernels import top_k_top_p_triton as keep_triton

    logits, ones, ids = torch.zeros(4, 151_936), torch.ones(4), torch.arange(4)
    for each in (logits, logits.bfloat16()):
        sample_triton.sample(each, ones, ids, ids, 2)
    keep_triton.top_k_top_p(logits, ids, ones, ones)


def compute():
    """Kernels of layers in exact mode."""
    from rollout.kernels import batch_invariant_linear_triton as product_triton
    from rollout.kernels import rms_norm_triton as norm_triton
    from rollout.kernels import silu_and_mul_triton as gate_triton

    states = torch.zeros(1, 32, 4096, dtype=torch.bfloat16)
    gate_triton.silu_and_mul(states, states)
    norm_triton.rms_norm(states, states[0, 0], 1e-6, states)
    norm_triton.rms_norm(states.view(1, 32, 32, 128), states[0, 0, :128], 1e-6)
    for rows in (32, 2048):
        few = states.new_zeros(rows, 256)
        product_triton.batch_invariant_linear(few, states.new_zeros(64, 256))


def close():
    """The product of few rows, in one part and in several."""
    from rollout.kernels import skinny_linear_triton as few_rows_triton

    for rows, outputs, inner, dtype in (
        (32, 24576, 4096, torch.bfloat16),
        (9, 4096, 12288, torch.bfloat16),
        (20, 1024, 2048, torch.float16),
    ):
        weight = torch.zeros(outputs, inner, dtype=dtype)
        states = weight.new_zeros(rows, inner)
        few_rows_triton.skinny_linear(states, weight, weight.new_zeros(outputs))


def decode(rows):
    """What a decode step of so many rows launches, at three bounds of the context."""
    from rollout.kernels import paged_attention_triton, sample_triton
    from rollout.kernels import rms_norm_triton as norm_triton
    from rollout.kernels import skinny_linear_triton as few_rows_triton

    dtype, ids = torch.bfloat16, torch.zeros(rows, dtype=torch.int64)
    weight = torch.zeros(128, 256, dtype=dtype)
    states = weight.new_zeros(rows, 256)
    few_rows_triton.skinny_linear(states, weight)
    norm_triton.rms_norm(states[None], states[0], 1e-6, states[None])
    norm_triton.rms_norm(states.view(1, rows, 2, 128), states[0, :128], 1e-6)
    cache = tuple(torch.zeros(3, 64, 2, 64, dtype=dtype) for _ in range(2))
    query, table = states.view(rows, 4, 64), torch.zeros(4, 9, dtype=torch.int64)
    for most in (2048, 8192, 32768):
        paged_attention_triton.decode(query, cache, table, ids, ids, max_context=most, scale=0.1)
    sample_triton.sample(torch.zeros(rows, 151_936, dtype=dtype), torch.ones(rows), ids, ids, 1)


if __name__ == "__main__":
    compile_alone()
    if sys.argv[1:] == ["decode"]:
        for rows in (32, 24, 4, 2, 1):
            decode(rows)
        sys.exit()
    attend(torch.bfloat16, 32, 8, 128, 256)
    attend(torch.float16, 12, 4, 96, 64, window=128, sinks_H=torch.zeros(12))
    attend(torch.bfloat16, 8, 1, 256, 16, softcap=30.0)
    draw()
    close()
    compute()
