"""Each Triton kernel against the plain torch function that defines it.

Without a GPU, kernels run in Triton's interpreter on small shapes; with a GPU, on large ones.
"""

import pytest
import tiny
import torch
from torch.nn.functional import linear, pad, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.kernels import flash, paged_attention, sample, top_k_top_p
from rollout.memory.kv_cache import KVCache, KVLayout
from rollout.model.attention import PagedAttention

pytest.importorskip("triton")
from rollout.kernels import paged_attention_triton, sample_triton, top_k_top_p_triton
from rollout.kernels.batch_invariant_linear_triton import batch_invariant_linear
from rollout.kernels.rms_norm_triton import rms_norm
from rollout.kernels.silu_and_mul_triton import silu_and_mul
from rollout.kernels.skinny_linear_triton import skinny_linear, split_k
from rollout.kernels.store_kv_triton import store_kv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Make pieces so small that few tokens fill several of each kind, for the interpreter."""
    if not ON_GPU:
        monkeypatch.setattr(paged_attention_triton, "SPLIT_TOKENS", 32)
        monkeypatch.setattr(paged_attention_triton, "_QUERY_BLOCK", 32)
        monkeypatch.setattr(sample_triton, "_CHUNK", 1024)
        monkeypatch.setattr(sample_triton, "_BLOCK", 512)
        monkeypatch.setattr(top_k_top_p_triton, "_BLOCK", 512)


# --- sampling

# Vocabularies of one chunk of the sampler, of several, and the start of the second chunk.
SOME_CHUNKS = [1024, 9001, 50_257, 151_936] if ON_GPU else [1024, 1300]
LAST = 8192 if ON_GPU else 1024


def sampling_inputs(rows, vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::5] = 0.0
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    return [part.to(DEVICE) for part in (logits.to(dtype), temperature, seeds, positions)]


def sampled_as_defined(*inputs):
    """The kernel's tokens, after comparing them with the definition."""
    tokens, scores = sample_triton.sample(*inputs, num_scores=2)
    wanted, wanted_scores = sample.sample(*inputs, num_scores=2)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(scores, wanted_scores, rtol=1e-5, atol=2e-5)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 13, *SOME_CHUNKS])
def test_sampler_draws_the_defined_tokens_bit_for_bit(vocab, dtype):
    for seed in range(20 if ON_GPU else 1):
        sampled_as_defined(*sampling_inputs(257 if ON_GPU else 7, vocab, dtype, seed))


@pytest.mark.parametrize("kept", [slice(0, 100), slice(1500, 1600), slice(LAST, None)], ids=str)
def test_sampler_takes_padded_rows_and_masked_logits(kept):
    """Whole blocks and whole chunks may be masked."""
    vocab = LAST + 8 if kept.start == LAST else 3000
    logits, *others = sampling_inputs(6, vocab, torch.float32)
    masked = torch.full((6, vocab + 70), torch.nan, device=DEVICE)[:, :vocab]
    masked[:] = -torch.inf
    masked[:, kept] = logits[:, kept]
    tokens = sampled_as_defined(masked, *others)
    assert (masked.gather(1, tokens[:, None]) > -torch.inf).all()


@pytest.mark.gpu
def test_draws_on_the_gpu_are_those_of_the_cpu():
    inputs = sampling_inputs(64, 151_936, torch.float32)
    tokens, _ = sample_triton.sample(*inputs)
    wanted, _ = sample.sample(*(part.cpu() for part in inputs))
    assert torch.equal(tokens.cpu(), wanted)


def filters(rows, vocab, seed=0):
    """Top-k, top-p and min-p per row; each is off in 40 % of rows."""
    generator = torch.Generator().manual_seed(seed)
    top_k = torch.randint(1, max(2, min(vocab, 60)), (rows,), generator=generator)
    top_k[torch.rand(rows, generator=generator) < 0.4] = 0
    top_p = torch.rand(rows, generator=generator).clamp(min=1e-6)
    top_p[torch.rand(rows, generator=generator) < 0.4] = 1.0
    min_p = torch.rand(rows, generator=generator) / 10
    min_p[torch.rand(rows, generator=generator) < 0.4] = 0.0
    return [part.to(DEVICE) for part in (top_k, top_p, min_p)]


def same_but_for_rounding(scaled, top_p, kept, wanted):
    """A sum that just reaches `top_p` depends on its order, so a tied token may stay or go."""
    same = (kept == wanted).all(1)
    shares = scaled.double().softmax(1)
    largest = shares.masked_fill(kept == wanted, 0.0).amax(1)
    smallest = shares.masked_fill(kept == wanted, 1.0).amin(1)
    near = largest <= smallest * 1.01
    return (same | (top_p < 1) & near).all() and same.float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16 has many ties
@pytest.mark.parametrize("vocab", [1, 13, *([5000, 50_257, 151_936] if ON_GPU else [700])])
def test_what_is_kept_is_what_a_sort_keeps(vocab, dtype):
    rows = 257 if ON_GPU else 7
    for seed in range(3 if ON_GPU else 1):
        scaled = sampling_inputs(rows, vocab, dtype, seed)[0].float()
        scaled[1::3, : vocab // 3] = -torch.inf
        asked = filters(rows, vocab, seed)
        kept = top_k_top_p_triton.top_k_top_p(scaled, *asked)
        wanted = top_k_top_p.top_k_top_p(scaled, *asked)
        assert same_but_for_rounding(scaled, asked[1], kept, wanted)
        for row in (0, 5):  # a row's result does not depend on the others
            mine = [part[row : row + 1] for part in (scaled, *asked)]
            assert torch.equal(kept[row : row + 1], top_k_top_p_triton.top_k_top_p(*mine))


# --- linear layers, norms, activations

# Heads, key/value heads, head size, tokens a page.
SHAPES = [(2, 2, 16, 4), (4, 2, 16, 16), (3, 1, 24, 3)]
# Full and partial pages, blocks of keys (32), splits (32) and tiles of queries (32).
LENGTHS = [1, 2, 15, 16, 33, 66, 97]
DTYPES = [torch.float32]
OPTIONS = [{}, {"window": 1}, {"window": 7, "sinks": 0.3}, {"softcap": 3.0}, {"sinks": 9.0}]
if ON_GPU:
    SHAPES = [(32, 8, 128, 256), (16, 16, 64, 16), (8, 1, 256, 256), (12, 4, 96, 64), (4, 2, 80, 8)]
    LENGTHS = [1, 63, 64, 65, 127, 255, 256, 257, 2047, 2048, 2049, 4096, 9000, 20_000]
    DTYPES = [torch.bfloat16, torch.float32, torch.float16]
    OPTIONS = [{}, {"window": 1}, {"window": 128, "sinks": 0.3}, {"window": 1500, "softcap": 3.0}]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def assert_close(output, wanted, dtype):
    output = output.float()
    assert output.isfinite().all()
    error = ((output - wanted).norm() / wanted.norm()).item()
    assert error < (1e-5 if dtype == torch.float32 else 6e-3)


def assert_linear(kernel, rows, outputs, inner, dtype, layout=torch.clone):
    """Compare a kernel with torch's linear layer, with and without a bias."""
    generator = torch.Generator().manual_seed(0)
    states, weight, bias = (
        torch.randn(*size, generator=generator).to(DEVICE, dtype)
        for size in ((1, rows, inner), (outputs, inner), (outputs,))
    )
    for added in (None, bias):
        wanted = linear(states.float(), weight.float(), None if added is None else bias.float())
        output = kernel(layout(states), layout(weight), added)
        assert output.shape == (1, rows, outputs)
        assert_close(output, wanted, dtype)


@EACH_DTYPE
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((1, 64, 16), torch.clone),
        ((33, 96, 200), torch.clone),
        ((33, 20, 129), lambda states: pad(states, (0, 7))[..., :-7]),
        ((70, 20, 129), lambda states: states.mT.contiguous().mT),
    ],
)
def test_batch_invariant_linear_is_the_linear_layers_for_any_strides(shape, layout, dtype):
    assert_linear(batch_invariant_linear, *shape, dtype, layout)


# Float32 in the interpreter, 16 bits on a GPU.
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16] if ON_GPU else [torch.float32], ids=str
)
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "splits"),
    [(1, 64, 128, 1), (9, 192, 640, 1), (32, 64, 2048, 4), (20, 128, 1024, 2)],
)
def test_skinny_linear_is_the_linear_layers(rows, outputs, inner, splits, dtype):
    assert split_k(outputs // 64, inner, 132) == splits
    for _ in range(2):  # each call must reset the arrival counts
        assert_linear(skinny_linear, rows, outputs, inner, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("float32", "bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("size", [128, 896, 2880, 4096, 5120])
def test_norms_give_torchs_bits(size, dtypes):
    first, second, third = (getattr(torch, dtype) for dtype in dtypes)
    norm = LlamaRMSNorm(size).to(DEVICE, third)
    norm.weight.data.normal_()
    for rows in (16, 33, 5000):
        states = torch.randn(1, rows, size, device=DEVICE, dtype=first)
        added = torch.randn(1, rows, size, device=DEVICE, dtype=second)
        normed, summed = rms_norm(states, norm.weight, norm.variance_epsilon, added)
        assert torch.equal(summed, states + added)
        assert torch.equal(normed, norm(summed))
    heads = torch.randn(1, 33, 3 * size, device=DEVICE, dtype=first)[..., size:]
    heads = heads.view(1, 33, 2, size)  # a slice of a wider product
    normed, _ = rms_norm(heads, norm.weight, norm.variance_epsilon)
    assert torch.equal(normed, norm(heads))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_silu_and_mul_gives_torchs_bits(dtype):
    both = torch.randn(1, 33, 2 * 3000, device=DEVICE, dtype=dtype) * 5
    gate, up = both.split(3000, dim=-1)
    assert torch.equal(silu_and_mul(gate, up), silu(gate) * up)


# --- attention


class Paged:
    """Rows of random keys and values in scattered pages; all else is NaN."""

    def __init__(self, lengths, heads, kv_heads, dim, page_tokens, dtype):
        self.generator = generator = torch.Generator().manual_seed(0)
        pages = [-(-length // page_tokens) for length in lengths]
        layout = KVLayout(
            num_layers=2, page_tokens=page_tokens, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype
        )
        self.lengths, self.heads, self.dim = lengths, heads, dim
        self.kv_cache = KVCache(layout, DEVICE)
        self.kv_cache.grow(sum(pages) + 3)
        self.cache = self.kv_cache.layer(1)
        for others, mine in zip(self.kv_cache.layer(0), self.cache, strict=True):
            others.zero_()
            mine.fill_(torch.nan)
        ids = torch.randperm(sum(pages), generator=generator) + 1
        # Lanes are shuffled; unused entries point to the trash page.
        self.lanes = torch.randperm(len(lengths), generator=generator)
        table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int64)
        for row, count in enumerate(pages):
            table[self.lanes[row], :count], ids = ids[:count], ids[count:]
        self.table, self.lanes = table.to(DEVICE), self.lanes.to(DEVICE)
        self.keys, self.values = (self._randn(sum(lengths), kv_heads, dtype) for _ in range(2))
        self.counts = torch.tensor(lengths, device=DEVICE)
        self.row_lanes = self.lanes.repeat_interleave(self.counts)
        self.positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        store_kv(self.keys, self.values, self.cache, self.table, self.row_lanes, self.positions)

    def _randn(self, count, heads, dtype):
        states = torch.randn(count, heads, self.dim, generator=self.generator)
        return states.to(DEVICE, dtype)

    def queries(self, count):
        return self._randn(count, self.heads, self.keys.dtype)

    def options(self, window=None, softcap=None, sinks=None):
        """Keyword arguments of the kernels; sinks are spread around `sinks`."""
        sinks_H = None
        if sinks is not None:
            sinks_H = torch.linspace(-sinks, 2 * sinks, self.heads).to(DEVICE, self.keys.dtype)
        return {"window": window, "softcap": softcap, "sinks_H": sinks_H, "scale": 0.2}

    def decode(self, query, lanes, positions, max_context=None, **options):
        cache, context = (self.cache, self.table), max_context or max(self.lengths)
        return paged_attention_triton.decode(
            query, *cache, lanes, positions, max_context=context, **options
        )

    def attend_runs(self, query, counts, firsts, starts=None, *, packed=False, **options):
        """Run `counts[i]` tokens of row `i` from position `firsts[i]`."""
        starts = counts.cumsum(0) - counts if starts is None else starts
        runs = torch.stack([self.lanes, starts, counts, firsts], dim=1)
        cache = (self.keys, self.values) if packed else self.cache
        table, longest = None if packed else self.table, int(counts.max())
        return paged_attention_triton.attend_runs(
            query, cache, runs, longest=longest, page_table_LP=table, **options
        )

    def expected(self, query, row, first, **options):
        """Float32 reference, (Q, H, D), for queries of one row from position `first`."""
        start = sum(self.lengths[:row])
        context = slice(start, start + self.lengths[row])
        positions = first + torch.arange(len(query), device=DEVICE)
        return paged_attention.attend(
            query[None].float(),
            self.keys[None, context].float(),
            self.values[None, context].float(),
            positions[None],
            **options,
        )[0]


@EACH_DTYPE
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_writes_every_token_to_its_page_and_nothing_else(shape, dtype):
    paged = Paged(LENGTHS, *shape, dtype)
    wanted = [torch.full_like(part, torch.nan) for part in paged.cache]
    pages = paged.table[paged.row_lanes, paged.positions // shape[3]]
    places = (pages, paged.positions % shape[3])
    paged_attention.store_kv(paged.keys, paged.values, wanted, places)
    for stored, expected in zip(paged.cache, wanted, strict=True):
        assert torch.equal(stored.nan_to_num(9e4), expected.nan_to_num(9e4))
    assert not any(part.any() for part in paged.kv_cache.layer(0))


# Every shape, option and dtype, but not every combination.
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        *((shape, DTYPES[0], options) for shape in SHAPES[:2] for options in OPTIONS),
        *((shape, dtype, OPTIONS[-1]) for shape in SHAPES[1:] for dtype in DTYPES),
        *((SHAPES[0], dtype, {}) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_decode_and_prefill_in_pieces_equal_the_reference(shape, dtype, options):
    """The last token of each row, and its last part over pages that hold the beginning."""
    paged = Paged(LENGTHS, *shape, dtype)
    options = paged.options(**options)
    query = paged.queries(len(LENGTHS))
    output = paged.decode(query, paged.lanes, paged.counts - 1, **options)
    for row, length in enumerate(LENGTHS):
        wanted = paged.expected(query[row : row + 1], row, length - 1, **options)
        assert_close(output[row : row + 1], wanted, dtype)
    counts = [max(1, length * 2 // 3) if length % 2 else length for length in LENGTHS]
    query, counts_N = paged.queries(sum(counts)), torch.tensor(counts, device=DEVICE)
    output, _ = paged.attend_runs(query, counts_N, paged.counts - counts_N, **options)
    for row, mine in enumerate(torch.arange(len(query), device=DEVICE).split(counts)):
        if counts[row] <= 5000:  # the reference stores every score
            wanted = paged.expected(query[mine], row, LENGTHS[row] - counts[row], **options)
            assert_close(output[mine], wanted, dtype)


@pytest.mark.skipif(ON_GPU, reason="runs on a CPU alone")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@EACH_DTYPE
def test_decode_on_a_cpu_equals_the_reference(dtype, options):
    paged = Paged(LENGTHS, *SHAPES[1], dtype)
    options = paged.options(**options)
    query = paged.queries(len(LENGTHS))
    where = (paged.cache, paged.table, paged.lanes, paged.counts - 1)
    output = paged_attention.decode(query, *where, max_context=max(LENGTHS), **options)
    for row, length in enumerate(LENGTHS):
        wanted = paged.expected(query[row : row + 1], row, length - 1, **options)
        assert_close(output[row : row + 1], wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("shape", [(32, 8, 128), (12, 4, 96), (4, 2, 80), (8, 1, 256)], ids=str)
def test_torchs_kernel_attends_over_packed_prompts_as_the_reference(shape, window):
    paged = Paged(LENGTHS[:-2], *shape, 256, torch.bfloat16)
    query, starts = paged.queries(sum(paged.lengths)), paged.counts.cumsum(0) - paged.counts
    options = {"scale": 0.2, "window": window}
    output = flash.attend_packed(
        query, paged.keys, paged.values, starts, longest=max(paged.lengths), **options
    )
    for row, mine in enumerate(torch.arange(len(query), device=DEVICE).split(paged.lengths)):
        wanted = paged.expected(query[mine], row, 0, **options)
        assert_close(output[mine], wanted, torch.bfloat16)


@EACH_DTYPE
def test_a_rows_result_is_the_same_bits_beside_any_others(dtype):
    paged = Paged(LENGTHS, *SHAPES[0], dtype)
    query, positions = paged.queries(len(LENGTHS)), paged.counts - 1

    def decode(rows, max_context):
        return paged.decode(query[rows], paged.lanes[rows], positions[rows], max_context, scale=0.2)

    everyone = list(range(len(LENGTHS)))
    together = decode(everyone, 4 * max(LENGTHS))
    assert torch.equal(decode(everyone[::-1], max(LENGTHS)), together.flip(0))
    for row, length in enumerate(LENGTHS):
        assert torch.equal(decode([row], length)[0], together[row])


def assert_same_bits(output, wanted):
    """Only almost equal in the interpreter: rounding of NumPy's products depends on their size."""
    if ON_GPU:
        assert torch.equal(output, wanted)
    else:
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-6)


@EACH_DTYPE
@pytest.mark.parametrize(
    "options", [OPTIONS[0], OPTIONS[2], {"window": 20, "softcap": 3.0}], ids=str
)
def test_decode_prefill_and_the_trainers_forward_agree_to_the_last_bit(options, dtype):
    """Each position by one query, by runs over pages in pieces, and by packed runs."""
    lengths = [length for length in LENGTHS if length < 5000] if ON_GPU else [1, 16, 39]
    paged = Paged(lengths, *SHAPES[0], dtype)
    options = paged.options(**options)
    query, counts = paged.queries(sum(lengths)), paged.counts
    zeros, firsts = torch.zeros_like(counts), counts // 3
    packed, lse = paged.attend_runs(query, counts, zeros, packed=True, with_lse=True, **options)
    assert lse.isfinite().all()
    in_pages, _ = paged.attend_runs(query, counts, zeros, **options)
    assert_same_bits(in_pages, packed)
    starts = counts.cumsum(0) - counts + firsts
    second, _ = paged.attend_runs(query, counts - firsts, firsts, starts, **options)
    in_second = second.flatten(1).any(1)
    assert in_second.sum() == (counts - firsts).sum()
    assert_same_bits(second[in_second], packed[in_second])
    for part in torch.arange(len(query), device=DEVICE).split(512):
        where = (paged.row_lanes[part], paged.positions[part])
        assert_same_bits(paged.decode(query[part], *where, **options), packed[part])


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_logarithms_of_the_weights_are_those_of_the_scores(options):
    paged = Paged([5, 40, 70], *SHAPES[0], torch.float32)
    options, query, counts = paged.options(**options), paged.queries(115), paged.counts
    zeros = torch.zeros_like(counts)
    _, lse = paged.attend_runs(query, counts, zeros, packed=True, with_lse=True, **options)
    for run in torch.arange(115, device=DEVICE).split(paged.lengths):
        keys = paged.keys[run].repeat_interleave(paged.heads // paged.keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[run], keys) * options["scale"]
        behind = run[:, None] - run
        visible = (behind >= 0) & (behind < (options["window"] or len(run)))
        scores = scores.masked_fill(~visible, -torch.inf)
        if options["sinks_H"] is not None:
            sinks = options["sinks_H"].view(-1, 1, 1).expand(-1, len(run), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        torch.testing.assert_close(lse[:, run], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(ON_GPU, reason="every GPU test of the engine shows it there")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_engine_on_these_kernels_gives_the_tokens_of_generate(family, monkeypatch):
    """The GPU code path of attention and sampling, in the interpreter."""

    def store(paged, layer, keys, values):
        where = (paged.page_table_LP, paged.lanes_T, paged.positions_T)
        store_kv(keys, values, paged.kv_cache.layer(layer), *where)

    def attend(paged, layer, query, *new, **options):
        cache, table = paged.kv_cache.layer(layer), paged.page_table_LP
        if paged.segments is not None:
            options["longest"] = max(len(segment.tokens) for segment in paged.segments)
            return paged_attention_triton.attend_runs(
                query, cache, paged.runs_N4, page_table_LP=table, **options
            )[0]
        where = (table, paged.lanes_T, paged.positions_T)
        context = paged.max_context
        return paged_attention_triton.decode(query, cache, *where, max_context=context, **options)

    monkeypatch.setattr(PagedAttention, "store", store)
    monkeypatch.setattr(PagedAttention, "attend", attend)
    monkeypatch.setattr("rollout.runner.forward.sample", sample_triton.sample)
    model, prompts = tiny.build(family), [[9], [10, 11, 12, 13, 14, 15, 16, 17], [19, 20]]
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, eos_token_ids=(tiny.EOS,))
    config = EngineConfig(max_rows=2, page_tokens=4, prefill_tokens=5)
    with RolloutEngine(model, config) as engine:
        completions = engine.generate(prompts, sampling)
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 3)
        wanted = tiny.logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=2e-5)
