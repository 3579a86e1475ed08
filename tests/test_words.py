"""Words that a row must not generate, against transformers' own processor."""

from contextlib import suppress

import fakes
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from rollout import EngineConfig, RequestError, RolloutEngine, SamplingParams
from rollout.kernels.philox import gumbel
from rollout.kernels.words import bar_words, push
from rollout.request import Request
from rollout.runner.sampling import Filters
from rollout.sampling_params import Draw
from rollout.scheduler.words import NO_TOKEN, lines_of, table_shape

SMALL = {"max_rows": 3, "page_tokens": 4, "prefill_tokens": 9}
VOCAB = 5  # so few that words are completed often

tokens = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=6)


def params(words, max_new_tokens=20, **asked):
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        bad_words_ids=tuple(tuple(word) for word in words),
        **{"eos_token_ids": (tiny.EOS,), **asked},
    )


def by_transformers(words, context, scores, eos):
    """Scores after transformers' processor, which takes no empty list and no list of EOS alone."""
    kept = [word for word in words if word not in [[token] for token in eos]]
    if not kept:
        return scores
    processor = NoBadWordsLogitsProcessor(words, torch.tensor(eos) if eos else None)
    return processor(torch.tensor([context]), scores)


# --- one draw


@given(
    rows=st.lists(st.tuples(words, st.lists(tokens, min_size=1, max_size=6)), min_size=1),
    generated=st.lists(tokens, max_size=6),
    room=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_what_is_barred_is_what_transformers_bars(rows, generated, room):
    """Rows of different words side by side, admitted in the middle and advanced to the end."""
    sampling = [params(words, eos_token_ids=()) for words, _ in rows]
    shape = table_shape(sampling)
    tables = np.full((len(rows), shape[0] + room[0], shape[1] + room[1]), NO_TOKEN)
    half = len(generated) // 2
    for lane, (how, (_, prompt)) in enumerate(zip(sampling, rows, strict=True)):
        if how.long_words:
            request = Request(np.array(prompt), how)
            entries = lines_of(lane, request, np.array(generated[:half], np.int64))
            tables[tuple(entries[:, :3].T)] = entries[:, 3]
    tables = torch.from_numpy(tables).int()
    if tables.shape[2] == 0:
        return
    for token in generated[half:]:
        tables[:, 0] = push(tables, torch.full((len(rows),), token))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
    found = bar_words(logits, tables)
    for row, (words, prompt) in enumerate(rows):
        alone = [word for word in words if len(word) == 1]
        wanted = by_transformers(words, prompt + generated, logits[row : row + 1], [])
        found[row, [word[0] for word in alone]] = -torch.inf  # those are marks
        assert torch.equal(found[row], wanted[0])


def test_logits_keep_their_bits_where_nothing_is_completed():
    logits = torch.tensor([[-0.0, 0.0, torch.nan, -torch.inf, 1e-45]])
    tables = torch.tensor([[[0, 1], [4, 3], [NO_TOKEN, NO_TOKEN]]], dtype=torch.int32)
    found = bar_words(logits, tables)
    assert torch.equal(found.view(torch.int32), logits.view(torch.int32))


def test_tables_grow_around_what_live_rows_have():
    filters = Filters(2, torch.device("cpu"))
    assert filters.open_words(3, 2)
    filters.words_LNW[1] = torch.arange(6).view(3, 2)
    before = filters.words_LNW
    assert not filters.open_words(2, 2)
    assert filters.words_LNW is before  # graphs have it
    assert filters.open_words(4, 2)
    assert filters.words_LNW.shape == (2, 6, 2)
    assert filters.open_words(4, 3)
    assert filters.words_LNW.shape == (2, 6, 4)
    assert torch.equal(filters.words_LNW[1, :3, :2], before[1])
    assert (filters.words_LNW[:, 3:] == NO_TOKEN).all()
    assert (filters.words_LNW[:, :, 2:] == NO_TOKEN).all()


# --- through the engine


@torch.no_grad()
def expected(model, prompt, how, seed):
    """Tokens that transformers' processor and our noise give, a full forward for each."""
    model.eval()
    ids, words = list(prompt), [list(word) for word in how.bad_words_ids]
    while len(ids) < len(prompt) + how.max_new_tokens:
        scores = model(torch.tensor([ids])).logits[:, -1].float()
        scores = by_transformers(words, ids, scores, list(how.eos_token_ids)) if words else scores
        scores = scores / (how.temperature or 1.0)
        if how.temperature > 0:
            scores = scores + gumbel(torch.tensor([seed]), torch.tensor([len(ids)]), tiny.VOCAB)
        ids.append(int(scores.argmax()))
        if ids[-1] in how.eos_token_ids:
            break
    return ids[len(prompt) :]


def words_of_what_came(prompts, completions):
    """Words that each row would otherwise generate: pairs, longer runs, and from the prompt on."""
    for index, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        words = [prompt[-1 - index % 3 :] + ids[:1], ids[1:3], ids[2:6], [ids[4], 9, 9]]
        yield [[], words, [*words, ids[3:4], [tiny.EOS]]][index % 3]


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("temperature", [0, 1.3])
def test_rows_with_and_without_words_are_those_of_transformers(num_slots, temperature):
    model, prompts = tiny.build(), tiny.prompts(9, seed=4)
    how = {"temperature": temperature, "eos_token_ids": ()}
    with RolloutEngine(model, EngineConfig(**SMALL, num_slots=num_slots)) as engine:
        plain = engine.generate(prompts, params([], **how))
        assert engine.worker.lanes.filters is None
        words = list(words_of_what_came(prompts, [c.token_ids for c in plain]))
        how["eos_token_ids"] = (tiny.EOS,)
        sampling = [params(row, **how) for row in words]
        completions = engine.generate(prompts, sampling)
    changed = 0
    for seed, (prompt, how, completion) in enumerate(
        zip(prompts, sampling, completions, strict=True)
    ):
        assert completion.token_ids == expected(model, prompt, how, seed)
        wanted = tiny.logprobs(model, prompt, completion.token_ids, temperature or 1.0)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        changed += completion.token_ids != plain[seed].token_ids[: len(completion.token_ids)]
    assert changed >= 6


def test_preempted_rows_and_lanes_with_a_new_row_know_what_they_end_with():
    prompts, model = tiny.prompts(8, seed=3), tiny.build()
    roomy = EngineConfig(**fakes.ROOM)
    with fakes.with_history_model(RolloutEngine(model, roomy)) as engine:
        plain = engine.generate(prompts, params([], 30, eos_token_ids=()))
        words = list(words_of_what_came(prompts, [c.token_ids for c in plain]))
        words = [[*row, c.token_ids[12:15]] for row, c in zip(words, plain, strict=True)]
        sampling = [params(row, 30 + i, eos_token_ids=()) for i, row in enumerate(words)]
        wanted = engine.generate(prompts, sampling)
        assert engine.stats.preemptions == 0
        page_bytes = engine.worker.kv_cache.layout.page_bytes
    for engine in fakes.short_of_pages(model, page_bytes):
        found = engine.generate(prompts, sampling)
        assert engine.stats.preemptions > 2
        again = engine.generate(prompts, params([], 30, eos_token_ids=()))
        assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
        assert [c.token_ids for c in again] == [c.token_ids for c in plain]


def test_a_row_that_joins_with_longer_words_leaves_the_others_theirs():
    model, prompts = tiny.build(), tiny.prompts(2, seed=6)
    how = {"temperature": 0, "eos_token_ids": ()}
    with fakes.with_history_model(RolloutEngine(model, EngineConfig(**SMALL))) as engine:
        plain = [c.token_ids for c in engine.generate(prompts, params([], **how))]
        words = [plain[0][7:9]], [plain[1][first:9] for first in range(8)]
        sampling = [params(row, **how) for row in words]
        alone = [engine.generate([p], how)[0] for p, how in zip(prompts, sampling, strict=True)]
        assert all(c.token_ids[8] != ids[8] for c, ids in zip(alone, plain, strict=True))
    done = []
    with fakes.with_history_model(RolloutEngine(model, EngineConfig(**SMALL))) as engine:
        engine.submit(prompts[0], sampling[0])
        for _ in range(4):
            done += engine.step()
        engine.submit(prompts[1], sampling[1])
        while engine.busy:
            done += engine.step()
    assert [c.token_ids for c in sorted(done, key=lambda c: c.row)] == [c.token_ids for c in alone]


@pytest.mark.parametrize("ends", [False, True, KeyboardInterrupt()])
def test_graphs_of_words_go_unless_their_table_is_known_to_have_stayed(monkeypatch, ends):
    """An interrupt may come when the table was moved, and before anybody was told."""

    def open_filters(*_):
        if isinstance(ends, BaseException):
            raise ends
        return ends

    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        forgotten = []
        monkeypatch.setattr(engine.worker.graphs, "forget", forgotten.append)
        monkeypatch.setattr(engine.worker.lanes, "open_filters", open_filters)
        with suppress(KeyboardInterrupt):
            engine.worker.prepare(1, 8, {Draw.WORDS}, (1, 1))
        assert forgotten == [Draw.WORDS] * bool(ends)


def test_words_travel_once_and_a_batch_without_them_does_without():
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        seen, run = [], engine.worker.graphs.run
        engine.worker.graphs.run = lambda slot: (
            seen.append((slot.batch.draw, slot.words.staged_bytes, slot.staged_bytes)),
            run(slot),
        )
        engine.generate([[9], [10]], [params([[5, 6], [5]], 12), params([[5]], 16)])
    draws, word_bytes, _ = zip(*seen, strict=True)
    assert draws == (Draw.WORDS,) * 12 + (Draw.MARKED,) * 4
    assert sum(bool(count) for count in word_bytes) == 1
    steady = {count for draw, _, count in seen[1:12] if draw == Draw.WORDS}
    assert len(steady) <= 2  # with and without a new page each


# --- what is asked


@pytest.mark.parametrize(
    ("asked", "draw"),
    [
        ({"bad_words_ids": ()}, Draw.PLAIN),
        ({"bad_words_ids": ((3,),)}, Draw.MARKED),
        ({"bad_words_ids": ((3,),), "eos_token_ids": (3,)}, Draw.PLAIN),
        ({"bad_words_ids": ((3,), (3, 4))}, Draw.WORDS),
        ({"bad_words_ids": ((3, 4),), "eos_token_ids": (4,)}, Draw.WORDS),
        ({"bad_words_ids": ((3, 4),), "top_k": 5, "min_p": 0.1}, Draw.WORDS),
    ],
    ids=str,
)
def test_a_draw_takes_no_more_than_its_words_need(asked, draw):
    assert SamplingParams(max_new_tokens=4, **asked).draw is draw


@pytest.mark.parametrize("words", [[(3,)], ((),), (3,), ([3],), "ab"], ids=repr)
def test_words_of_another_form_are_refused(words):
    with pytest.raises(RequestError, match=r"bad_words_ids=.*: it must be a tuple"):
        SamplingParams(max_new_tokens=4, bad_words_ids=words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([[3], [61]], "bad_words_ids: token id 61 is outside the vocabulary, 0 to 60"),
        ([[61, 3]], "bad_words_ids: token id 61 is outside"),
        ([[token] for token in range(61) if token != 7], None),
        ([[token] for token in range(61) if token != 7] + [[3, 7]], "leave none of the 61 tokens"),
    ],
    ids=["one", "first of two", "all but EOS", "all"],
)
def test_words_that_the_model_does_not_know_or_that_leave_nothing_are_named(words, message):
    with RolloutEngine(tiny.build(), EngineConfig(**SMALL)) as engine:
        if message is None:
            assert engine.generate([[9]], params(words))[0].token_ids == [tiny.EOS]
            return
        with pytest.raises(RequestError, match=message):
            engine.generate([[9]], params(words))
