"""Compile the Triton kernels for Hopper on a machine without a GPU.

A separate process, because Triton chooses its interpreter when it is imported. Prints one line per
launch: the kernel's name, bytes of shared memory per program and hash of the compiled code. The
argument `decode` compiles decode steps of several sizes; without it, every kernel is compiled.
"""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from rollout.kernels.batch_invariant_linear_triton import batch_invariant_linear
from rollout.kernels.paged_attention_triton import attend_runs, decode
from rollout.kernels.recurrent import delta_rule_triton, short_conv_triton
from rollout.kernels.rms_norm_triton import rms_norm
from rollout.kernels.sample_triton import sample
from rollout.kernels.silu_and_mul_triton import silu_and_mul
from rollout.kernels.skinny_linear_triton import skinny_linear
from rollout.kernels.store_kv_triton import store_kv
from rollout.kernels.top_k_top_p_triton import top_k_top_p

BF16, VOCAB = torch.bfloat16, 151_936


class Hopper:
    """The part of a driver that the compiler calls."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


def compile_alone():
    """Make each kernel launch compile to machine code and run nothing."""
    triton.runtime.driver.set_active(Hopper())
    torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (9, 0)
    run = JITFunction.run

    def compile_and_print(kernel, *args, warmup, **options):
        compiled = run(kernel, *args, warmup=True, **options)
        assert compiled.asm["cubin"]
        sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared} {compiled.hash}\n")

    JITFunction.run = compile_and_print


def attend(dtype, heads, kv_heads, dim, page_tokens, **options):
    query = torch.zeros(4, heads, dim, dtype=dtype)
    new = tuple(torch.zeros(4, kv_heads, dim, dtype=dtype) for _ in range(2))
    cache = tuple(torch.zeros(3, page_tokens, kv_heads, dim, dtype=dtype) for _ in range(2))
    table, lanes = torch.zeros(4, 9, dtype=torch.int64), torch.arange(4)
    store_kv(*new, cache, table, lanes, lanes)
    options = {"scale": 0.1, **options}
    decode(query, cache, table, lanes, lanes, max_context=9000, **options)
    runs, options["longest"] = torch.zeros(2, 4, dtype=torch.int64), 4
    attend_runs(query, cache, runs, page_table_LP=table, **options)
    attend_runs(query, new, runs, with_lse=True, **options)


def recurrent(dtype, keys, values, taps):
    ids, heads = torch.arange(4), torch.zeros(4, 32)
    query, value = torch.zeros(4, 16, keys, dtype=dtype), torch.zeros(4, 32, values, dtype=dtype)
    states, inputs = torch.zeros(5, 32, values, keys), torch.zeros(5, 512, taps - 1, dtype=dtype)
    tokens = query, query, value, heads, heads.to(dtype)
    delta_rule_triton.decode(*tokens, states, ids, ids, normalised=True)
    x, weight = torch.zeros(4, 512, dtype=dtype), torch.zeros(512, taps, dtype=dtype)
    for bias in (None, weight[:, 0].contiguous()):
        short_conv_triton.decode(x, weight, bias, inputs, ids, ids)


def every_kernel():
    recurrent(BF16, 128, 128, 4)
    recurrent(torch.float16, 96, 64, 3)
    attend(BF16, 32, 8, 128, 256)
    attend(torch.float16, 12, 4, 96, 64, window=128, sinks_H=torch.zeros(12))
    attend(BF16, 8, 1, 256, 16, softcap=30.0)
    logits, ones, ids = torch.zeros(4, VOCAB), torch.ones(4), torch.arange(4)
    for each in (logits, logits.bfloat16()):
        sample(each, ones, ids, ids, 2)
    top_k_top_p(logits, ids, ones, ones)
    for rows, outputs, inner, dtype in (  # with one split and with several
        (32, 24576, 4096, BF16),
        (9, 4096, 12288, BF16),
        (20, 1024, 2048, torch.float16),
    ):
        weight = torch.zeros(outputs, inner, dtype=dtype)
        skinny_linear(weight.new_zeros(rows, inner), weight, weight.new_zeros(outputs))
    states = torch.zeros(1, 32, 4096, dtype=BF16)
    silu_and_mul(states, states)
    rms_norm(states, states[0, 0], 1e-6, states)
    rms_norm(states.view(1, 32, 32, 128), states[0, 0, :128], 1e-6)
    for rows in (32, 2048):
        batch_invariant_linear(states.new_zeros(rows, 256), states.new_zeros(64, 256))


def decode_step(rows):
    """The launches of one decode step, at three bounds of the context."""
    ids, weight = torch.zeros(rows, dtype=torch.int64), torch.zeros(128, 256, dtype=BF16)
    states = weight.new_zeros(rows, 256)
    skinny_linear(states, weight)
    rms_norm(states[None], states[0], 1e-6, states[None])
    rms_norm(states.view(1, rows, 2, 128), states[0, :128], 1e-6)
    cache = tuple(torch.zeros(3, 64, 2, 64, dtype=BF16) for _ in range(2))
    query, table = states.view(rows, 4, 64), torch.zeros(4, 9, dtype=torch.int64)
    for most in (2048, 8192, 32768):
        decode(query, cache, table, ids, ids, max_context=most, scale=0.1)
    sample(torch.zeros(rows, VOCAB, dtype=BF16), torch.ones(rows), ids, ids, 1)


if __name__ == "__main__":
    compile_alone()
    if sys.argv[1:] == ["decode"]:
        for rows in (32, 24, 4, 2, 1):
            decode_step(rows)
    else:
        every_kernel()
