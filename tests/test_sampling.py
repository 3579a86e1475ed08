"""Draws follow the softmax and depend only on the row's seed and position."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from rollout.kernels import sample as definition
from rollout.kernels import sample_cpu
from rollout.kernels import top_k_top_p as top_k_top_p_definition
from rollout.kernels.philox import gumbel, log, philox
from rollout.runner.sampling import sample, top_k_top_p


# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds): counter, key, words.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    got = philox(torch.tensor([key]), tuple(torch.tensor([word]) for word in counter))
    assert [int(word) for word in got] == words


def test_log_is_as_good_as_the_librarys():
    x = torch.cat([torch.logspace(-37, 38, 100_001), 1 + torch.linspace(-1e-3, 1e-3, 10_001)])
    exact = x.double().log()
    error = (log(x).double() - exact).abs()
    assert (error <= 2.0**-22 * exact.abs()).all()
    assert log(torch.ones(1)).item() == 0


def test_noise_is_standard_gumbel_and_finite():
    noise = gumbel(torch.arange(400), torch.arange(400), 2501).double()
    assert noise.shape == (400, 2501)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.005)
    for x in (-1.5, 0.0, 1.0, 3.0, 8.0):
        wanted = math.exp(-math.exp(-x))
        error = (wanted * (1 - wanted) / noise.numel()) ** 0.5
        assert (noise <= x).double().mean().item() == pytest.approx(wanted, abs=4 * error)


def test_draws_follow_the_softmax_at_temperature():
    torch.manual_seed(0)
    rows, vocab, temperature = 40_000, 13, 0.7
    logits = torch.randn(1, vocab)
    tokens, _ = sample(
        logits.expand(rows, vocab),
        torch.full((rows,), temperature),
        torch.arange(rows),
        torch.full((rows,), 5),
    )
    wanted = (logits[0] / temperature).softmax(0)
    shares = torch.bincount(tokens, minlength=vocab) / rows
    # Four standard deviations of a binomial share.
    assert ((shares - wanted).abs() < 4 * (wanted * (1 - wanted) / rows).sqrt()).all()


def test_a_draw_depends_on_seed_and_position_alone():
    torch.manual_seed(0)
    logits, temperature = torch.randn(64, 50), torch.full((64,), 1.3)
    seeds, positions = torch.arange(64) * 7919, torch.arange(64) % 9
    tokens, logprobs = sample(logits, temperature, seeds, positions)
    order = torch.randperm(64)[:17]
    again = sample(logits[order], temperature[order], seeds[order], positions[order])
    assert torch.equal(tokens[order], again[0])
    assert torch.equal(logprobs[order], again[1])
    assert not torch.equal(tokens, sample(logits, temperature, seeds + 1, positions)[0])
    assert not torch.equal(tokens, sample(logits, temperature, seeds, positions + 1)[0])


def test_temperature_zero_is_greedy_and_scores_at_temperature_one():
    torch.manual_seed(0)
    logits = torch.randn(8, 30)
    zeros, rows = torch.zeros(8), torch.arange(8)
    tokens, logprobs = sample(logits, zeros, rows, rows)
    assert torch.equal(tokens, logits.argmax(1))
    assert torch.equal(logprobs[:, 0], logits.log_softmax(1).max(1).values)


def test_logprobs_are_at_temperature_over_the_whole_vocabulary():
    torch.manual_seed(0)
    logits = torch.randn(16, 30, dtype=torch.bfloat16)
    temperature = torch.linspace(0.3, 2.0, 16)
    tokens, logprobs = sample(logits, temperature, torch.arange(16), torch.arange(16))
    # TRL's fused head multiplies by the inverse; a division would change the last bit.
    wanted = (logits.float() * (1 / temperature)[:, None]).log_softmax(1)
    assert torch.equal(logprobs, wanted.gather(1, tokens[:, None]))
    divided = (logits.float() / temperature[:, None]).log_softmax(1)
    torch.testing.assert_close(wanted, divided, rtol=1e-6, atol=1e-6)
    assert logprobs.dtype == torch.float32


def test_the_entropy_is_that_of_the_distribution_drawn_from():
    torch.manual_seed(0)
    logits = torch.randn(16, 30)
    logits[::3, 5:20] = -torch.inf
    temperature = torch.linspace(0.3, 2.0, 16)
    _, scores = sample(logits, temperature, torch.arange(16), torch.arange(16), num_scores=2)
    wanted = Categorical(logits=logits / temperature[:, None]).entropy()
    torch.testing.assert_close(scores[:, 1], wanted)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**62),
    vocab=st.sampled_from([1, 3, 4, 61, 1000, 50_001]),
    spread=st.sampled_from([0.0, 1.0, 20.0, 1e4, 1e30]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_the_cpus_fast_path_draws_what_the_definition_draws(seed, vocab, spread, masked):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=generator) * spread
    out = torch.rand(3, vocab, generator=generator) < masked
    out[:, vocab // 2] = False
    logits = logits.masked_fill(out, -torch.inf)
    seeds = torch.randint(2**63 - 1, (3,), generator=generator)
    positions = torch.randint(2**20, (3,), generator=generator)
    temperatures = torch.tensor([0.0, 0.3, 1.7])
    wanted = definition.sample(logits, temperatures, seeds, positions, 2)
    tokens, scores = sample_cpu.sample(logits, temperatures, seeds, positions, 2)
    assert torch.equal(tokens, wanted[0])
    assert torch.equal(scores, wanted[1])


def test_the_cpus_words_are_philoxs():
    words = np.empty(50_001, np.uint32)
    sample_cpu.fill_words(words, 2**63 - 5, 77)
    quads = torch.arange(12_501)
    zeros = torch.zeros_like(quads)
    random = philox(torch.tensor(2**63 - 5), (quads, zeros + 77, zeros, zeros))
    assert np.array_equal(words, torch.stack(random, dim=1).flatten()[:50_001].numpy())


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_a_score_that_is_not(broken):
    logits = torch.zeros(2, 9)
    logits[0, 3] = broken
    _, scores = sample_cpu.sample(logits, torch.ones(2), torch.arange(2), torch.arange(2))
    assert not scores[0].isfinite()
    assert scores[1].isfinite()


def test_filters_that_keep_all_sort_nothing(monkeypatch):
    logits = torch.randn(4, 1000)
    knobs = torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.tensor([0.0, 0.1, 0.9, 1.0])
    wanted = top_k_top_p_definition.top_k_top_p(logits, *knobs)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert torch.equal(top_k_top_p(logits, *knobs), wanted)
