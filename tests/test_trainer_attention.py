"""The trainer's attention in exact mode: values, gradients, and no effect of padding."""

import pytest
import tiny
import torch
from transformers import AttentionInterface

from rollout.errors import UnsupportedModel
from rollout.exact.attention import EXACT_ATTENTION, exact_attention, exact_attention_forward

HEADS, KV_HEADS, DIM = 4, 2, 8
OPTIONS = [
    (None, None, False),
    (3, None, True),
    (None, 1.5, False),
    (1, None, False),
    (4, 2.0, True),
]


def states(tokens, dtype=torch.float64, seed=0, shape=(HEADS, KV_HEADS, DIM)):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, shape[2], generator=generator, dtype=dtype).requires_grad_()
        for n in (shape[0], shape[1], shape[1])
    ]


def runs(*spans):
    return torch.tensor([[0, start, count, 0] for start, count in spans])


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [(None, None, False), (3, None, True), (None, 1.5, False), (1, None, False), (4, 2.0, True)],
)
def test_gradients_are_those_of_finite_differences(window, softcap, sinks):
    sinks_H = torch.linspace(-1, 2, 2, dtype=torch.float64).requires_grad_() if sinks else None
    inputs = [*states(9, shape=(2, 1, 4)), *([sinks_H] if sinks else [])]

    def attention(query, keys, values, sinks_H=None):
        # A sequence, padding, a sequence of one token, a sequence.
        options = (5, 0.3, window, softcap, sinks_H)
        output, _ = exact_attention(query, keys, values, runs((0, 2), (3, 1), (4, 5)), *options)
        return output

    assert torch.autograd.gradcheck(attention, inputs)


def test_operator_is_what_a_compiler_takes_it_for():
    query, keys, values = states(9, torch.float32)
    sinks = torch.zeros(HEADS, requires_grad=True)
    arguments = (query, keys, values, runs((1, 5), (6, 3)), 9, 0.3, 4, 2.0, sinks)
    # Forward only: the plain backward loops over sequences, which cannot be compiled.
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.twinslot.exact_attention.default, arguments, test_utils=checks)


def test_padding_and_neighbours_move_no_bit():
    query, keys, values = (x.detach() for x in states(40, torch.float32))
    options = (40, 0.3, None, None, None)
    alone, _ = exact_attention(query[:7], keys[:7], values[:7], runs((0, 7)), *options)
    for start in (0, 3, 20):
        moved = []
        for tensor, other in zip((query, keys, values), states(40, torch.float32, 1), strict=True):
            moved.append(other.detach().clone())
            moved[-1][start : start + 7] = tensor[:7]
        output, _ = exact_attention(*moved, runs((start, 7), (30, 10)), *options)
        assert torch.equal(output[start : start + 7], alone)
        outside = torch.ones(40, dtype=torch.bool)
        outside[start : start + 7] = outside[30:] = False
        assert not output[outside].any()


def padded(prompts, side):
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(longest - len(prompt), None)
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}


def loss_and_gradients(model, batch):
    model.zero_grad()
    # A row's first token has no loss, because padding would predict it.
    learnt = batch["attention_mask"].cumsum(1) * batch["attention_mask"] > 1
    labels = batch["input_ids"].masked_fill(~learnt, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss"]
)
def test_models_train_as_with_their_own_attention(family, side):
    model = tiny.build(family).train()
    batch = padded(tiny.prompts(5, longest=20), side)
    loss, gradients = loss_and_gradients(model, batch)
    model.set_attn_implementation(EXACT_ATTENTION)
    exact_loss, exact_gradients = loss_and_gradients(model, batch)
    torch.testing.assert_close(exact_loss, loss, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(exact_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_gradient_checkpointing_changes_no_bit():
    model = tiny.build().train()
    model.set_attn_implementation(EXACT_ATTENTION)
    batch = padded(tiny.prompts(5, longest=20), "left")
    loss, gradients = loss_and_gradients(model, batch)
    model.gradient_checkpointing_enable()
    again, others = loss_and_gradients(model, batch)
    assert torch.equal(again, loss)
    assert all(torch.equal(*pair) for pair in zip(gradients, others, strict=True))


def test_packed_sequences_do_not_see_each_other():
    model = tiny.build().eval()
    model.set_attn_implementation(EXACT_ATTENTION)
    prompts = [prompt for prompt in tiny.prompts(6, longest=9) if len(prompt) > 1]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    with torch.no_grad():
        packed = model(
            torch.tensor([[token for prompt in prompts for token in prompt]]),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            cu_seq_lens_q=bounds,
            use_cache=False,
        ).logits[0]
        for prompt, logits in zip(prompts, packed.split(lengths.tolist()), strict=True):
            wanted = model(torch.tensor([prompt]), use_cache=False).logits[0]
            torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_what_the_rollout_could_not_repeat_is_refused():
    module, query = torch.nn.Module(), torch.randn(1, HEADS, 1, DIM)
    key = torch.randn(1, KV_HEADS, 5, DIM)
    assert AttentionInterface()[EXACT_ATTENTION] is exact_attention_forward
    with pytest.raises(UnsupportedModel, match="cannot train with a KV cache"):
        exact_attention_forward(module, query, key, key, None)
    with pytest.raises(UnsupportedModel, match=r"cannot train with dropout=0\.1"):
        exact_attention_forward(module, query, query, query, None, dropout=0.1)


# Equal lengths, unpadded or padded on either side: cuDNN's backward. Packed rows: flash's.
SPANS = {
    "whole": (128, (0, 128), (128, 128), (256, 128)),
    "left": (128, (28, 100), (255, 1), (256, 128)),
    "right": (128, (0, 100), (128, 1), (256, 128)),
    "packed": (150, (0, 150), (150, 1), (151, 120), (300, 84)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize(
    ("shape", "window", "softcap"),
    [
        ((8, 2, 128), None, None),
        ((4, 4, 64), None, None),
        ((4, 2, 80), None, None),
        ((4, 1, 256), None, None),
        ((8, 2, 128), 30, None),
        ((8, 2, 128), None, 2.0),
    ],
    ids=str,
)
def test_gradients_in_16_bit_are_those_of_float32(spans, shape, window, softcap):
    longest, *runs_of = SPANS[spans]
    heads, kv_heads, dim = shape
    torch.manual_seed(0)
    sizes = [(384, n, dim) for n in (heads, kv_heads, kv_heads)]
    states = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    gradient = torch.randn(sizes[0], device="cuda").bfloat16()
    options = (dim**-0.5, window, softcap)

    def gradients(attention, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in states]
        output = attention(*inputs)
        return [output, *torch.autograd.grad(output, inputs, gradient.to(dtype))]

    def ours(*inputs):
        return exact_attention(*inputs, runs(*runs_of).cuda(), longest, *options, None)[0]

    def plain(*inputs):
        return plain_attention(*inputs, runs_of, *options)

    cases = (ours, torch.bfloat16), (plain, torch.float32), (plain, torch.bfloat16)
    for ours_, exactly, rounded in zip(*(gradients(*each) for each in cases), strict=True):
        # The measure of FlashAttention's own tests, which allow factors of 2 to 3.
        assert (ours_ - exactly).abs().max() <= 2 * (rounded - exactly).abs().max()


def plain_attention(query, keys, values, spans, scale, window, softcap):
    """Sequence by sequence, with every step in the dtype of the states."""
    output, group = torch.zeros_like(query), query.shape[1] // keys.shape[1]
    for start, count in spans:
        mine, at = slice(start, start + count), torch.arange(count, device=query.device)
        key, value = (
            x[mine].repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values)
        )
        scores = query[mine].transpose(0, 1) @ key.mT * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        distance = at[:, None] - at
        hidden = (distance < 0) | (distance >= (window or count))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        output[mine] = (weights @ value).transpose(0, 1)
    return output
