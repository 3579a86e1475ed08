"""Paged attention against dense attention, and the arguments it refuses."""

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rollout import EngineConfig, RolloutEngine, SamplingParams
from rollout.errors import UnsupportedModel
from rollout.memory.kv_cache import KVCache, KVLayout
from rollout.model.attention import PagedAttention, paged_attention_forward
from rollout.scheduler.batch import Segment

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4
# `layer` is the second of three: in the last layer, a prefill only stores keys and values.
LAYOUT = KVLayout(
    num_layers=3, page_tokens=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32
)


def layer() -> nn.Module:
    module = nn.Module()
    module.layer_idx, module.kv_layer, module.mask_window = 1, torch.tensor(1), None
    return module


def dense(query, keys, values, window, softcap):
    """Attention of one sequence; `query` is (H, T, D) and ends at the last key."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
    context, num_queries = keys.shape[1], query.shape[1]
    position = torch.arange(context)
    behind = position[context - num_queries :, None] - position
    visible = (behind >= 0) & (behind < (window or context))
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=0.3)
    scores = softcap * torch.tanh(query @ keys.mT * 0.3 / softcap)
    return scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values


@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_prefill_in_pieces_and_decode_equal_dense_attention(window, softcap):
    torch.manual_seed(0)
    lengths = [1, 4, 5, 11]
    cache = KVCache(LAYOUT, torch.device("cpu"))
    cache.grow(20)
    # Unused positions hold NaN, so reading one shows.
    for part in cache.layer(1):
        part.fill_(torch.nan)
    tables = (torch.randperm(19)[:16] + 1).view(4, 4)
    q, k, v = (
        [torch.randn(heads, n + 1, DIM) for n in lengths] for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def check(spans, segments=None):
        """Run tokens [start, stop) of each (row, start, stop), packed."""
        lanes = torch.cat([torch.full((stop - start,), row) for row, start, stop in spans])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        packed = [torch.cat([x[r][:, a:b] for r, a, b in spans], 1)[None] for x in (q, k, v)]
        longest = int(positions.max()) + 1
        with PagedAttention(cache, tables, lanes, positions, longest, segments).active():
            output, _ = paged_attention_forward(
                layer(), *packed, None, scaling=0.3, sliding_window=window, softcap=softcap
            )
        outputs = output[0].split([stop - start for _, start, stop in spans])
        for (row, start, stop), mine in zip(spans, outputs, strict=True):
            query, keys, values = q[row][:, start:stop], k[row][:, :stop], v[row][:, :stop]
            wanted = dense(query, keys, values, window, softcap)
            torch.testing.assert_close(mine.transpose(0, 1), wanted, rtol=1e-5, atol=1e-6)

    # Prefill row 3 in two pieces and the others whole, then decode one step of all rows.
    for spans in ([(0, 0, 1), (3, 0, 6)], [(1, 0, 4), (2, 0, 5), (3, 6, 11)]):
        check(spans, [Segment(row, first, np.zeros(stop - first)) for row, first, stop in spans])
    check([(row, n, n + 1) for row, n in enumerate(lengths)])


def test_what_paged_attention_does_not_know_is_refused_by_name():
    states = torch.randn(1, HEADS, 1, DIM)
    with pytest.raises(UnsupportedModel, match=r"Module passes \['head_mask'\]"):
        paged_attention_forward(layer(), states, states, states, None, head_mask=torch.ones(HEADS))
    with pytest.raises(UnsupportedModel, match="attention_mask"):
        paged_attention_forward(layer(), states, states, states, torch.ones(1))


def test_a_prefill_ends_when_the_last_layer_has_stored_its_keys_and_values():
    model, ran = tiny.build(), []
    with RolloutEngine(model, EngineConfig(max_rows=2, page_tokens=4)) as engine:
        for index, layer in enumerate(engine.worker.twin.base.model.layers):
            layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
        tiny.assert_on_policy(engine, model)
        ran.clear()
        engine.generate([list(range(8, 30))], SamplingParams(max_new_tokens=1))
    assert ran == [0, 1, 0, 1, 2]  # the prompt without its last token, then the last token
