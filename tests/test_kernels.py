"""Each Triton kernel against the plain torch that defines it.

Without a GPU they run in Triton's interpreter on small shapes; with one, compiled, on large ones.
"""

import pytest
import tiny
import torch
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rollout import RolloutConfig, RolloutEngine, SamplingParams
from rollout.kernels import flash
from rollout.kernels import paged_attention as torch_attention
from rollout.kernels import sample as torch_sample
from rollout.kernels import top_k_top_p as torch_keep
from rollout.memory.kv_cache import KVCache, KVLayout
from rollout.model.attention import PagedAttention

pytest.importorskip("triton")
from rollout.kernels import batch_invariant_linear_triton as product_triton
from rollout.kernels import paged_attention_triton as triton_attention
from rollout.kernels import rms_norm_triton as norm_triton
from rollout.kernels import sample_triton, store_kv_triton
from rollout.kernels import silu_and_mul_triton as gate_triton
from rollout.kernels import skinny_linear_triton as few_rows_triton
from rollout.kernels import top_k_top_p_triton as keep_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
pytestmark = [pytest.mark.gpu] if ON_GPU else []


# Vocabularies of a whole chunk of the sampler and of some chunks; and where the second one begins.
SOME_CHUNKS = [1024, 9001, 50_257, 151_936] if ON_GPU else [1024, 1300]
LAST = 8192 if ON_GPU else 1024


def sampling_inputs(rows, vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    temperature = torch.rand(rows, generator=generator) * 2
    temperature[::5] = 0.0
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    parts = (logits.to(dtype), temperature, seeds, positions)
    return [part.to(DEVICE) for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 13, *SOME_CHUNKS])
def test_sampler_draws_the_defined_tokens_bit_for_bit(vocab, dtype):
    for seed in range(20 if ON_GPU else 1):
        inputs = sampling_inputs(257 if ON_GPU else 7, vocab, dtype, seed)
        tokens, found = sample_triton.sample(*inputs, num_scores=2)
        wanted, scores = torch_sample.sample(*inputs, num_scores=2)
        assert torch.equal(tokens, wanted)
        torch.testing.assert_close(found, scores, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kept", [slice(0, 100), slice(1500, 1600), slice(LAST, None)], ids=str)
def test_sampler_takes_padded_rows_and_masked_logits(kept):
    """Whole blocks and whole chunks may be masked."""
    vocab = LAST + 8 if kept.start == LAST else 3000
    logits, *rest = sampling_inputs(6, vocab, torch.float32)
    masked = torch.full((6, vocab + 70), torch.nan, device=DEVICE)
    masked[:, :vocab] = -torch.inf
    masked[:, :vocab][:, kept] = logits[:, kept]
    logits = masked[:, :vocab]
    tokens, found = sample_triton.sample(logits, *rest, 2)
    wanted, scores = torch_sample.sample(logits, *rest, 2)
    assert torch.equal(tokens, wanted)
    assert (logits.gather(1, tokens[:, None]) > -torch.inf).all()
    torch.testing.assert_close(found, scores, rtol=1e-5, atol=2e-5)


@pytest.mark.gpu
def test_draws_on_the_gpu_are_those_of_the_cpu():
    inputs = sampling_inputs(64, 151_936, torch.float32)
    tokens, _ = sample_triton.sample(*inputs)
    wanted, _ = torch_sample.sample(*(part.cpu() for part in inputs))
    assert torch.equal(tokens.cpu(), wanted)


def filters(rows, vocab, seed=0):
    """Top-k, top-p and min-p of each row, of which many ask for nothing."""
    generator = torch.Generator().manual_seed(seed)
    top_k = torch.randint(1, max(2, min(vocab, 60)), (rows,), generator=generator)
    top_k[torch.rand(rows, generator=generator) < 0.4] = 0
    top_p = torch.rand(rows, generator=generator).clamp(min=1e-6)
    top_p[torch.rand(rows, generator=generator) < 0.4] = 1.0
    min_p = torch.rand(rows, generator=generator) / 10
    min_p[torch.rand(rows, generator=generator) < 0.4] = 0.0
    return [part.to(DEVICE) for part in (top_k, top_p, min_p)]


def same_but_for_rounding(scaled, asked, found, wanted):
    """A sum that just reaches `top_p` rounds by its order: some tie then stays, or goes."""
    same = (found == wanted).all(1)
    shares = scaled.double().softmax(1)
    largest = shares.masked_fill(found == wanted, 0.0).amax(1)
    smallest = shares.masked_fill(found == wanted, 1.0).amin(1)
    near = largest <= smallest * 1.01
    return (same | (asked[1] < 1) & near).all() and same.float().mean() > 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # which has many ties
@pytest.mark.parametrize("vocab", [1, 13, *([5000, 50_257, 151_936] if ON_GPU else [700])])
def test_what_is_kept_is_what_a_sort_keeps(vocab, dtype):
    rows = 257 if ON_GPU else 7
    for seed in range(3 if ON_GPU else 1):
        scaled = sampling_inputs(rows, vocab, dtype, seed)[0].float()
        scaled[1::3, : vocab // 3] = -torch.inf
        asked = filters(rows, vocab, seed)
        found = keep_triton.top_k_top_p(scaled, *asked)
        wanted = torch_keep.top_k_top_p(scaled, *asked)
        assert same_but_for_rounding(scaled, asked, found, wanted)


@pytest.mark.gpu
def test_what_a_row_keeps_is_the_same_beside_any_others():
    scaled, asked = sampling_inputs(64, 151_936, torch.float32)[0], filters(64, 151_936)
    together = keep_triton.top_k_top_p(scaled, *asked)
    for row in (0, 5, 63):
        mine = slice(row, row + 1)
        alone = keep_triton.top_k_top_p(scaled[mine], *(part[mine] for part in asked))
        assert torch.equal(together[mine], alone)


class Paged:
    """Rows of random keys and values in scattered pages, the rest of which holds NaN."""

    def __init__(self, lengths, heads, kv_heads, dim, page_tokens, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-length // page_tokens) for length in lengths]
        layout = KVLayout(
            num_layers=2, page_tokens=page_tokens, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype
        )
        self.lengths, self.heads, self.dim = lengths, heads, dim
        self.kv_cache = KVCache(layout, DEVICE)
        self.kv_cache.grow(sum(pages) + 3)
        self.kv_cache._data.zero_()
        self.cache = self.kv_cache.layer(1)
        for part in self.cache:
            part.fill_(torch.nan)
        ids = torch.randperm(sum(pages), generator=generator) + 1
        # Lanes in another order than rows, unused entries at the trash page.
        self.lanes = torch.randperm(len(lengths), generator=generator)
        table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int64)
        for row, count in enumerate(pages):
            table[self.lanes[row], :count], ids = ids[:count], ids[count:]
        self.table, self.lanes = table.to(DEVICE), self.lanes.to(DEVICE)
        shape = (sum(lengths), kv_heads, dim)
        self.keys, self.values = (
            torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2)
        )
        lengths_N = torch.tensor(lengths, device=DEVICE)
        self.row_lanes = self.lanes.repeat_interleave(lengths_N)
        self.positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])
        self.generator = generator

    def store(self):
        store_kv_triton.store_kv(
            self.keys, self.values, self.cache, self.table, self.row_lanes, self.positions
        )

    def queries(self, count):
        query = torch.randn(count, self.heads, self.dim, generator=self.generator)
        return query.to(DEVICE, self.keys.dtype)

    def options(self, window=None, softcap=None, sinks=None):
        """Keywords of the kernels; sinks of every sign around `sinks`."""
        sinks_H = None if sinks is None else torch.linspace(-sinks, 2 * sinks, self.heads)
        sinks_H = None if sinks_H is None else sinks_H.to(DEVICE, self.keys.dtype)
        return {"window": window, "softcap": softcap, "sinks_H": sinks_H, "scale": 0.2}

    def expected(self, query, row, first, **options):
        """Float32 reference for queries of one row from position `first` on, `(Q, H, D)`."""
        start = sum(self.lengths[:row])
        context = slice(start, start + self.lengths[row])
        positions = first + torch.arange(len(query), device=DEVICE)
        return torch_attention.attend(
            query[None].float(),
            self.keys[None, context].float(),
            self.values[None, context].float(),
            positions[None],
            **options,
        )[0]


def assert_close(found, wanted, dtype):
    found = found.float()
    assert found.isfinite().all()
    error = ((found - wanted).norm() / wanted.norm()).item()
    assert error < (1e-5 if dtype == torch.float32 else 6e-3)


# Heads, key/value heads, head size, tokens a page.
SHAPES = [(2, 2, 16, 4), (4, 2, 16, 16), (3, 1, 24, 3)]
# Whole and broken pages, blocks of keys (32), splits (32) and tiles of queries (32).
LENGTHS = [1, 2, 15, 16, 33, 66, 97]
DTYPES = [torch.float32]
OPTIONS = [{}, {"window": 1}, {"window": 7, "sinks": 0.3}, {"softcap": 3.0}, {"sinks": 9.0}]
if ON_GPU:
    SHAPES = [(32, 8, 128, 256), (16, 16, 64, 16), (8, 1, 256, 256), (12, 4, 96, 64), (4, 2, 80, 8)]
    LENGTHS = [1, 63, 64, 65, 127, 255, 256, 257, 2047, 2048, 2049, 4096, 9000, 20_000]
    DTYPES = [torch.bfloat16, torch.float32, torch.float16]
    OPTIONS = [{}, {"window": 1}, {"window": 128, "sinks": 0.3}, {"window": 1500, "softcap": 3.0}]
# Every shape, every option and every dtype, though not each with each.
CASES = [
    *((shape, DTYPES[0], options) for shape in SHAPES[:2] for options in OPTIONS),
    *((shape, dtype, OPTIONS[-1]) for shape in SHAPES[1:] for dtype in DTYPES),
    *((SHAPES[0], dtype, {}) for dtype in DTYPES[1:]),
]
EACH_CASE = pytest.mark.parametrize(("shape", "dtype", "options"), CASES, ids=str)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """In the interpreter few tokens already make several pieces of each kind."""
    if not ON_GPU:
        monkeypatch.setattr(triton_attention, "SPLIT_TOKENS", 32)
        monkeypatch.setattr(triton_attention, "_QUERY_BLOCK", 32)
        monkeypatch.setattr(sample_triton, "_CHUNK", 1024)
        monkeypatch.setattr(sample_triton, "_BLOCK", 512)
        monkeypatch.setattr(keep_triton, "_BLOCK", 512)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store_writes_every_token_to_its_page_and_nothing_else(shape, dtype):
    paged = Paged(LENGTHS, *shape, dtype)
    paged.store()
    wanted = [torch.full_like(part, torch.nan) for part in paged.cache]
    pages = paged.table[paged.row_lanes, paged.positions // shape[3]]
    places = (pages, paged.positions % shape[3])
    torch_attention.store_kv(paged.keys, paged.values, wanted, places)
    for found, expected in zip(paged.cache, wanted, strict=True):
        assert torch.equal(found.nan_to_num(9e4), expected.nan_to_num(9e4))
    assert not any(part.any() for part in paged.kv_cache.layer(0))


@EACH_CASE
def test_decode_equals_the_reference(shape, dtype, options):
    paged = Paged(LENGTHS, *shape, dtype)
    paged.store()
    query = paged.queries(len(LENGTHS))
    positions = torch.tensor(LENGTHS, device=DEVICE) - 1
    found = triton_attention.decode(
        query, paged.cache, paged.table, paged.lanes, positions,
        max_context=max(LENGTHS), **paged.options(**options),
    )  # fmt: skip
    for row, length in enumerate(LENGTHS):
        wanted = paged.expected(query[row : row + 1], row, length - 1, **paged.options(**options))
        assert_close(found[row : row + 1], wanted, dtype)


@EACH_CASE
def test_prefill_in_pieces_equals_the_reference(shape, dtype, options):
    """The last part of every row, over pages that hold its beginning."""
    paged = Paged(LENGTHS, *shape, dtype)
    paged.store()
    counts = [max(1, length * 2 // 3) if length % 2 else length for length in LENGTHS]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    firsts = [length - count for length, count in zip(LENGTHS, counts, strict=True)]
    runs = torch.tensor([starts, counts, firsts], device=DEVICE)
    runs = torch.cat([paged.lanes[None], runs]).T.contiguous()
    query = paged.queries(sum(counts))
    found, _ = triton_attention.attend_runs(
        query, paged.cache, runs, longest=max(counts), page_table_LP=paged.table,
        **paged.options(**options),
    )  # fmt: skip
    for row, (start, count, first) in enumerate(zip(starts, counts, firsts, strict=True)):
        if count <= 5000:  # the reference holds every score
            mine = slice(start, start + count)
            wanted = paged.expected(query[mine], row, first, **paged.options(**options))
            assert_close(found[mine], wanted, dtype)


def product_of(rows, outputs, inner, bias, dtype):
    """States `(1, rows, inner)`, weight, a bias or none, and their linear layer in float32."""
    generator = torch.Generator().manual_seed(0)
    states, weight, added = (
        torch.randn(*size, generator=generator).to(DEVICE, dtype)
        for size in ((rows, inner), (outputs, inner), (outputs,))
    )
    added = added if bias else None
    wanted = linear(states.float(), weight.float(), None if added is None else added.float())
    return states[None], weight, added, wanted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 16), (33, 96, 200), (70, 20, 129)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_unsplit_product_is_the_linear_layers(shape, bias, dtype):
    rows, outputs, inner = shape
    *inputs, wanted = product_of(rows, outputs, inner, bias, dtype)
    found = product_triton.batch_invariant_linear(*inputs)
    assert found.shape == (1, rows, outputs)
    assert_close(found[0], wanted, dtype)


def test_unsplit_product_takes_what_lies_in_any_order():
    states, weight, _, wanted = product_of(33, 20, 129, False, DTYPES[0])
    apart = torch.nn.functional.pad(states, (0, 7))[..., :129]
    for turned in (apart, states.mT.contiguous().mT):
        found = product_triton.batch_invariant_linear(turned, weight.T.contiguous().T)
        assert_close(found[0], wanted, DTYPES[0])


# In the interpreter float32; on a GPU it is for 16 bits.
@pytest.mark.parametrize(
    "dtype", DTYPES if not ON_GPU else [torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "parts"),
    [(1, 64, 128, 1), (9, 192, 640, 1), (32, 64, 2048, 4), (20, 128, 1024, 2)],
)
def test_product_of_few_rows_is_the_linear_layers(rows, outputs, inner, parts, bias, dtype):
    assert few_rows_triton.split_k(outputs // 64, inner, 132) == parts
    *inputs, wanted = product_of(rows, outputs, inner, bias, dtype)
    for _ in range(3):  # what counts the parts is zero again after each
        found = few_rows_triton.skinny_linear(*inputs)
        assert found.shape == (1, rows, outputs)
        assert_close(found[0], wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 128])
@pytest.mark.parametrize("shape", [(32, 8, 128), (12, 4, 96), (4, 2, 80), (8, 1, 256)], ids=str)
def test_torchs_kernel_attends_over_packed_prompts_as_the_reference(shape, window):
    paged = Paged(LENGTHS[:-2], *shape, 256, torch.bfloat16)
    query = paged.queries(sum(paged.lengths))
    lengths = torch.tensor(paged.lengths, device=DEVICE)
    found = flash.attend_packed(
        query, paged.keys, paged.values, lengths.cumsum(0) - lengths,
        longest=max(paged.lengths), scale=0.2, window=window,
    )  # fmt: skip
    for row, mine in enumerate(torch.arange(len(query), device=DEVICE).split(paged.lengths)):
        wanted = paged.expected(query[mine], row, 0, scale=0.2, window=window)
        assert_close(found[mine], wanted, torch.bfloat16)


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
        normed, total = norm_triton.rms_norm(states, norm.weight, norm.variance_epsilon, added)
        assert torch.equal(total, states + added)
        assert torch.equal(normed, norm(total))
    heads = torch.randn(1, 33, 3 * size, device=DEVICE, dtype=first)[..., size:]
    heads = heads.view(1, 33, 2, size)  # a part of a wider product
    normed, _ = norm_triton.rms_norm(heads, norm.weight, norm.variance_epsilon)
    assert torch.equal(normed, norm(heads))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gated_silu_gives_torchs_bits(dtype):
    both = torch.randn(1, 33, 2 * 3000, device=DEVICE, dtype=dtype) * 5
    gate, up = both.split(3000, dim=-1)
    assert torch.equal(gate_triton.silu_and_mul(gate, up), silu(gate) * up)


@pytest.mark.skipif(ON_GPU, reason="every GPU test of the engine shows it there")
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_engine_on_these_kernels_gives_the_tokens_of_generate(family, monkeypatch):
    """The GPU's way through attention and sampling, in the interpreter."""

    def store(paged, layer, keys, values):
        where = (paged.page_table_LP, paged.lanes_T, paged.positions_T)
        store_kv_triton.store_kv(keys, values, paged.kv_cache.layer(layer), *where)

    def attend(paged, layer, query, *new, **options):
        cache = paged.kv_cache.layer(layer)
        if paged.segments is not None:
            return paged._prefill_on_gpu(cache, query, new, options)
        where = (paged.page_table_LP, paged.lanes_T, paged.positions_T)
        context = paged.max_context
        return triton_attention.decode(query, cache, *where, max_context=context, **options)

    monkeypatch.setattr(PagedAttention, "store", store)
    monkeypatch.setattr(PagedAttention, "attend", attend)
    monkeypatch.setattr("rollout.runner.forward.sample", sample_triton.sample)
    model, prompts = tiny.build(family), [[9], [10, 11, 12, 13, 14, 15, 16, 17], [19, 20]]
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, eos_token_ids=(tiny.EOS,))
    config = RolloutConfig(max_rows=2, page_tokens=4, prefill_tokens=5)
    with RolloutEngine(model, config) as engine:
        completions = engine.generate(prompts, sampling)
    model.eval()
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == tiny.greedy(model, prompt, 3)
        wanted = tiny.logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_result_is_the_same_bits_beside_any_others(dtype):
    paged = Paged(LENGTHS, *SHAPES[0], dtype)
    paged.store()
    query, positions = paged.queries(len(LENGTHS)), torch.tensor(LENGTHS, device=DEVICE) - 1

    def decode(rows, max_context):
        return triton_attention.decode(
            query[rows], paged.cache, paged.table, paged.lanes[rows], positions[rows],
            max_context=max_context, scale=0.2,
        )  # fmt: skip

    everyone = list(range(len(LENGTHS)))
    together = decode(everyone, 4 * max(LENGTHS))
    assert torch.equal(decode(everyone[::-1], max(LENGTHS)), together.flip(0))
    for row, length in enumerate(LENGTHS):
        assert torch.equal(decode([row], length)[0], together[row])


def assert_same_bits(found, wanted):
    """Or almost so in the interpreter, whose products are NumPy's and follow their size."""
    if ON_GPU:
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options", [OPTIONS[0], OPTIONS[2], {"window": 20, "softcap": 3.0}], ids=str
)
def test_decode_prefill_and_the_trainers_forward_agree_to_the_last_bit(options, dtype):
    """Each position of each row: by one query, by runs over pages in pieces, by packed runs."""
    lengths = [length for length in LENGTHS if length < 5000] if ON_GPU else [1, 16, 39]
    paged = Paged(lengths, *SHAPES[0], dtype)
    paged.store()
    how = paged.options(**options)
    query = paged.queries(sum(lengths))
    counts = torch.tensor(lengths, device=DEVICE)
    starts, zeros = counts.cumsum(0) - counts, torch.zeros_like(counts)
    runs = torch.stack([paged.lanes, starts, counts, zeros], dim=1)
    new = (paged.keys, paged.values)
    packed, lse = triton_attention.attend_runs(
        query, new, runs, longest=max(lengths), with_lse=True, **how
    )
    assert lse.isfinite().all()
    pages = {"page_table_LP": paged.table, **how}
    in_pages, _ = triton_attention.attend_runs(
        query, paged.cache, runs, longest=max(lengths), **pages
    )
    assert_same_bits(in_pages, packed)
    firsts = counts // 3
    pieces = torch.stack([paged.lanes, starts + firsts, counts - firsts, firsts], dim=1)
    second, _ = triton_attention.attend_runs(
        query, paged.cache, pieces, longest=max(lengths), **pages
    )
    in_second = second.flatten(1).any(1)
    assert in_second.sum() == (counts - firsts).sum()
    assert_same_bits(second[in_second], packed[in_second])
    for part in torch.arange(len(query), device=DEVICE).split(512):
        decoded = triton_attention.decode(
            query[part], paged.cache, paged.table, paged.row_lanes[part], paged.positions[part],
            max_context=max(lengths), **how,
        )  # fmt: skip
        assert_same_bits(decoded, packed[part])


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_logarithms_of_the_weights_are_those_of_the_scores(options):
    paged = Paged([5, 40, 70], *SHAPES[0], torch.float32)
    how = paged.options(**options)
    query, counts = paged.queries(115), torch.tensor([5, 40, 70], device=DEVICE)
    starts, zeros = counts.cumsum(0) - counts, torch.zeros_like(counts)
    runs = torch.stack([zeros, starts, counts, zeros], dim=1)
    new = (paged.keys, paged.values)
    _, lse = triton_attention.attend_runs(query, new, runs, longest=70, with_lse=True, **how)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        run = slice(start, start + count)
        keys = paged.keys[run].repeat_interleave(paged.heads // paged.keys.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", query[run], keys) * how["scale"]
        behind = torch.arange(count, device=DEVICE)[:, None] - torch.arange(count, device=DEVICE)
        visible = (behind >= 0) & (behind < (how["window"] or count))
        scores = scores.masked_fill(~visible, -torch.inf)
        if how["sinks_H"] is not None:
            sinks = how["sinks_H"].view(-1, 1, 1).expand(-1, count, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        torch.testing.assert_close(lse[:, run], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
