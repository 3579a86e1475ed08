"""Top-k, top-p, min-p and penalties against transformers' own logits processors."""

import fakes
import pytest
import tiny
import torch
from transformers.generation import logits_process as processors

from rollout import EngineConfig, RequestError, RolloutEngine, SamplingParams
from rollout.kernels.penalties import penalise
from rollout.kernels.philox import gumbel
from rollout.kernels.top_k_top_p import top_k_top_p
from rollout.runner.sampling import kept_mass, sample, sample_among
from rollout.sampling_params import Draw
from rollout.scheduler.token_flags import COUNT_UNIT, EOS, SEEN, SUPPRESSED

ROWS, VOCAB = 33, 200


def random_logits(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, VOCAB, generator=generator) * 3).to(dtype)


def keys(rows=ROWS):
    return torch.arange(rows) * 7919, torch.arange(rows) + 3


def column(value, dtype=torch.float32):
    return torch.full((ROWS,), value, dtype=dtype)


def warpers(asked: SamplingParams, prompt_tokens: int):
    """transformers' processors for these filters, in its order."""
    if asked.repetition_penalty != 1:
        yield processors.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)
    if asked.min_new_tokens:
        yield processors.MinNewTokensLengthLogitsProcessor(
            prompt_tokens, asked.min_new_tokens, list(asked.eos_token_ids), device="cpu"
        )
    if asked.suppress_tokens:
        yield processors.SuppressTokensLogitsProcessor(list(asked.suppress_tokens), device="cpu")
    if asked.bad_words_ids:
        bad_words = [list(word) for word in asked.bad_words_ids]
        yield processors.NoBadWordsLogitsProcessor(bad_words, torch.tensor(asked.eos_token_ids))
    yield processors.TemperatureLogitsWarper(float(asked.temperature or 1.0))
    if asked.top_k > 0:
        yield processors.TopKLogitsWarper(asked.top_k)
    if asked.top_p < 1:
        yield processors.TopPLogitsWarper(asked.top_p)
    if asked.min_p > 0:
        yield processors.MinPLogitsWarper(asked.min_p)


# --- kept tokens


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 50, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_what_is_kept_is_what_transformers_keeps(asked, temperature):
    logits = random_logits()
    sampling = SamplingParams(max_new_tokens=1, temperature=temperature, **asked)
    wanted = logits
    for warper in warpers(sampling, 0):
        wanted = warper(None, wanted)
    kept = top_k_top_p(
        logits / temperature,
        column(sampling.top_k, torch.int64),
        column(sampling.top_p),
        column(sampling.min_p),
    )
    assert torch.equal(kept, wanted > -torch.inf)


def test_each_row_is_filtered_as_it_asks():
    logits = random_logits()
    top_k = torch.arange(ROWS) % 5
    top_p, min_p = torch.linspace(0.2, 1.0, ROWS), torch.linspace(0.0, 0.1, ROWS)
    kept = top_k_top_p(logits, top_k, top_p, min_p)
    for row in range(ROWS):
        mine = slice(row, row + 1)
        assert torch.equal(
            kept[mine], top_k_top_p(logits[mine], top_k[mine], top_p[mine], min_p[mine])
        )


def test_nothing_asked_keeps_every_token_and_some_ties_are_kept_together():
    everything = column(0, torch.int64), column(1.0), column(0.0)
    spiked = torch.full((ROWS, VOCAB), -100.0)  # their sum would round to 1 too early
    spiked[:, 3] = 0.0
    assert top_k_top_p(spiked, *everything).all()
    spiked[:, [5, 9, 11]] = -1.0
    kept = top_k_top_p(spiked, column(2, torch.int64), column(1.0), column(0.0))
    assert kept[0].nonzero().flatten().tolist() == [3, 5, 9, 11]


# --- penalties


def test_the_repetition_penalty_is_transformers():
    logits, tokens = random_logits(), torch.randint(0, VOCAB, (ROWS, 30))
    flags = torch.zeros(ROWS, VOCAB, dtype=torch.int32).scatter(1, tokens, SEEN)
    penalties = torch.tensor([1.3, 0.0, 0.0]).expand(ROWS, 3)
    penalised = penalise(logits, flags, penalties, column(1.0) > 0)
    assert torch.equal(penalised, processors.RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits))


def test_presence_and_frequency_count_what_was_generated():
    logits, tokens = random_logits(), torch.randint(0, 50, (ROWS, 30))
    counts = torch.zeros(ROWS, VOCAB).scatter_add(1, tokens, torch.ones(ROWS, 30))
    flags = (counts * COUNT_UNIT).int() + SEEN * (counts > 0)
    flags[:, 60:70] = SEEN  # in the prompt
    penalties = torch.tensor([1.0, 0.7, -0.2]).expand(ROWS, 3)
    penalised = penalise(logits, flags.int(), penalties, column(1.0) > 0)
    torch.testing.assert_close(penalised, logits - 0.7 * (counts > 0) + 0.2 * counts)


def test_what_is_suppressed_is_out_and_what_stops_only_for_a_while():
    logits, flags = random_logits(), torch.zeros(ROWS, VOCAB, dtype=torch.int32)
    flags[:, 4], flags[:, 9] = SUPPRESSED | SEEN, EOS
    early = torch.arange(ROWS) % 2 == 0
    penalised = penalise(logits, flags, torch.tensor([1.0, 0.0, 0.0]).expand(ROWS, 3), early)
    wanted = logits.clone()
    wanted[:, 4] = -torch.inf
    wanted[early, 9] = -torch.inf
    assert torch.equal(penalised, wanted)


# --- draws


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_everything_kept_draw_and_scores_are_those_of_today_bit_for_bit(dtype):
    logits, temperature = random_logits(dtype), torch.linspace(0, 2, ROWS)
    wanted = sample(logits, temperature, *keys(), 2)
    tokens, scores = sample_among(logits, logits.float(), temperature, *keys(), 2)
    assert torch.equal(tokens, wanted[0])
    assert torch.equal(scores, wanted[1])
    assert torch.equal(kept_mass(logits, logits.float(), temperature), torch.ones(ROWS))


def test_draws_follow_the_kept_ones_and_scores_the_whole_vocabulary():
    torch.manual_seed(0)
    rows, vocab = 40_000, 13
    logits = torch.randn(1, vocab).expand(rows, vocab)
    kept = top_k_top_p(
        logits / 0.7, torch.full((rows,), 6), torch.full((rows,), 0.8), torch.zeros(rows)
    )
    among = logits.masked_fill(~kept, -torch.inf)
    temperature = torch.full((rows,), 0.7)
    tokens, scores = sample_among(logits, among, temperature, *keys(rows))
    wanted = (among[0] / 0.7).softmax(0)
    shares = torch.bincount(tokens, minlength=vocab) / rows
    assert ((shares - wanted).abs() <= 4 * (wanted * (1 - wanted) / rows).sqrt()).all()
    logprobs = (logits / 0.7).log_softmax(1).gather(1, tokens[:, None])
    torch.testing.assert_close(scores, logprobs)
    mass = kept_mass(logits, among, temperature)
    torch.testing.assert_close(scores[:, 0].exp() / mass, wanted[tokens])


def test_logits_that_are_no_numbers_stay_seen():
    logits = random_logits()
    logits[3, 5] = torch.nan
    nothing = column(5, torch.int64), column(0.9), column(0.0)
    among = logits.masked_fill(~top_k_top_p(logits, *nothing), -torch.inf)
    _, scores = sample_among(logits, among, column(1.0), *keys())
    assert scores.isfinite().all(1).tolist() == [row != 3 for row in range(ROWS)]


# --- end to end

SMALL = {"max_rows": 3, "page_tokens": 4, "prefill_tokens": 9}
ASKED = [
    {"top_k": 4},
    {"top_p": 0.7, "temperature": 1.4},
    {"min_p": 0.2, "temperature": 2.0},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    {"repetition_penalty": 1.8, "temperature": 0},
    {"repetition_penalty": 1.4, "top_p": 0.8},
    {"min_new_tokens": 12, "eos_token_ids": (tiny.EOS, 20, 21, 22, 23, 24, 25)},
    {"suppress_tokens": tuple(range(0, tiny.VOCAB, 2))},
    {"bad_words_ids": tuple((token,) for token in range(1, tiny.VOCAB, 2))},  # EOS among them
    {},
]


@torch.no_grad()
def by_transformers(model, prompt, sampling, seed):
    """Tokens by transformers' processors and our noise, with one full forward per token."""
    model.eval()
    ids = list(prompt)
    while len(ids) < len(prompt) + sampling.max_new_tokens:
        scores = model(torch.tensor([ids])).logits[:, -1].float()
        for warper in warpers(sampling, len(prompt)):
            scores = warper(torch.tensor([ids]), scores)
        if sampling.temperature > 0:
            scores = scores + gumbel(torch.tensor([seed]), torch.tensor([len(ids)]), tiny.VOCAB)
        ids.append(int(scores.argmax()))
        if ids[-1] in sampling.eos_token_ids:
            break
    return ids[len(prompt) :]


def params(asked, max_new_tokens=20):
    return SamplingParams(**{"max_new_tokens": max_new_tokens, "eos_token_ids": (7,), **asked})


@pytest.mark.parametrize("num_slots", [1, 2])
def test_rows_of_every_kind_together_are_those_of_transformers(num_slots):
    model, prompts = tiny.build(), tiny.prompts(len(ASKED) * 2, seed=4)
    sampling = [params(asked) for asked in ASKED] * 2
    config = EngineConfig(**SMALL, num_slots=num_slots, kept_mass=True, entropies=True)
    with RolloutEngine(model, config) as engine:
        completions = engine.generate(prompts, sampling)
    means = []
    for seed, (prompt, asked, completion) in enumerate(
        zip(prompts, sampling, completions, strict=True)
    ):
        assert completion.token_ids == by_transformers(model, prompt, asked, seed)
        wanted = tiny.logprobs(model, prompt, completion.token_ids, asked.temperature or 1.0)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        assert len(completion.entropies) == len(completion.token_ids)
        least = torch.tensor(completion.logprobs).exp() * (1 - 1e-5)
        mass = torch.tensor(completion.kept_mass)
        assert (mass <= 1 + 1e-5).all()
        assert (mass >= least).all() or asked.repetition_penalty != 1
        assert (mass == 1).all() or asked.draw != Draw.PLAIN
        means.append(mass.mean().item())
    assert min(means) < 0.9  # some probability is cut off


def test_a_top_k_beyond_any_vocabulary_keeps_all():
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        rollouts = [
            engine.generate([[9, 10]] * 2, params({"top_k": k, "top_p": 0.9}))
            for k in (0, 2**63 - 1, 10**400)
        ]
    ids = [[completion.token_ids for completion in completions] for completions in rollouts]
    assert ids[0] == ids[1] == ids[2]


def test_penalties_of_counts_reach_the_device():
    """With a strong presence penalty, greedy rows repeat no token."""
    sampling = params({"presence_penalty": 2.0, "temperature": 0, "eos_token_ids": ()}, 40)
    model = tiny.build()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("lm_head.weight", "embed_tokens.weight")):
                weight.mul_(0.02)  # logits differ by less than the penalty
    with RolloutEngine(model, EngineConfig(**SMALL)) as engine:
        (completion,) = engine.generate([[9, 10]], sampling)
    assert len(set(completion.token_ids)) == 40


def test_preempted_rows_go_on_as_if_nothing_had_happened():
    prompts = tiny.prompts(8, seed=3)
    asked = [{"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"top_k": 5}, *ASKED[5:]]
    sampling = [params(asked[i % len(asked)] | {"eos_token_ids": ()}, 30 + i) for i in range(8)]
    sampling[3] = params({"min_new_tokens": 31, "eos_token_ids": tuple(range(0, 60, 3))}, 33)
    roomy = EngineConfig(**fakes.ROOM)
    with fakes.with_history_model(RolloutEngine(tiny.build(), roomy)) as engine:
        wanted = engine.generate(prompts, sampling)
        assert engine.stats.preemptions == 0
        page_bytes = engine.worker.kv_cache.layout.page_bytes
    for engine in fakes.short_of_pages(tiny.build(), page_bytes):
        rows = engine.generate(prompts, sampling)
        assert engine.stats.preemptions > 2
        assert [c.token_ids for c in rows] == [c.token_ids for c in wanted]
        assert [c.logprobs for c in rows] == [c.logprobs for c in wanted]
    assert len(wanted[3].token_ids) > 30


def test_a_lane_forgets_the_flags_of_the_row_before():
    prompts, plain = tiny.prompts(6, seed=5), params({"eos_token_ids": ()})
    suppressed = params({"suppress_tokens": tuple(range(2, tiny.VOCAB, 2))})
    config = EngineConfig(max_rows=2, page_tokens=4)
    with fakes.with_history_model(RolloutEngine(tiny.build(), config)) as engine:
        wanted = engine.generate(prompts, plain)
        assert engine.worker.lanes.filters is None
        engine.generate(prompts, suppressed)
        penalised = engine.generate(prompts, [plain, suppressed] * 3)
        kept = engine.generate(prompts, [plain, params({"top_k": 3})] * 3)
    for index in range(0, 6, 2):
        assert penalised[index].token_ids == kept[index].token_ids == wanted[index].token_ids
        assert penalised[index].logprobs == wanted[index].logprobs


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"suppress_tokens": (3, 61)}, "suppress_tokens: token id 61 is outside"),
        ({"min_new_tokens": 2, "eos_token_ids": (99,)}, "eos_token_ids: token id 99 is outside"),
        ({"bad_words_ids": ((61,),)}, "bad_words_ids: token id 61 is outside"),
        ({"suppress_tokens": tuple(range(61))}, "suppress all of the 61 tokens"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_suppressed_are_named(asked, message):
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        with pytest.raises(RequestError, match=message):
            engine.generate([[9]], params(asked))
        engine.generate([[9]], params({"eos_token_ids": (99,)}))  # never drawn, harmless
