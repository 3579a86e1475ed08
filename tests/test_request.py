"""Which requests are accepted, and what the request classes promise."""

import numpy as np
import pytest

from rollout.errors import RequestError
from rollout.request import FinishReason, Request
from rollout.sampling_params import SETTINGS, Draw, SamplingParams
from rollout.scheduler.token_flags import COUNT_UNIT, EOS, SEEN, SUPPRESSED, token_flags

NAN = float("nan")


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_new_tokens": 16_384, "temperature": 0},
        {"max_new_tokens": 1, "temperature": 1e-6},
        {"max_new_tokens": 1, "temperature": 0.7, "eos_token_ids": (0, 151_645)},
    ],
)
def test_good_values_are_kept(knobs):
    sampling = SamplingParams(**knobs)
    assert {name: getattr(sampling, name) for name in knobs} == knobs


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: "),
        ({"max_new_tokens": -5}, "max_new_tokens=-5: "),
        ({"max_new_tokens": NAN}, "max_new_tokens=nan: "),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0: "),
        ({"max_new_tokens": "8"}, "max_new_tokens='8': "),
        ({"max_new_tokens": None}, "max_new_tokens=None: "),
        ({"max_new_tokens": True}, "max_new_tokens=True: "),
        ({"temperature": -0.1}, r"temperature=-0\.1: "),
        ({"temperature": NAN}, "temperature=nan: "),
        ({"temperature": float("inf")}, "temperature=inf: "),
        ({"temperature": 1e39}, r"temperature=1e\+39: "),
        ({"temperature": 1e-42}, "temperature=1e-42: "),
        ({"temperature": "hot"}, "temperature='hot': "),
        ({"temperature": 10**400}, "temperature=10{400}: "),
        ({"eos_token_ids": None}, "eos_token_ids=None: "),
        ({"eos_token_ids": (1.5,)}, r"token in eos_token_ids=1\.5: "),
        ({"eos_token_ids": (-1,)}, "token in eos_token_ids=-1: "),
        ({"stop_strings": ["a"]}, r"stop_strings=\['a'\]: "),
        ({"top_k": -2}, "top_k=-2: "),
        ({"top_k": 1.5}, r"top_k=1\.5: "),
        ({"top_p": 0.0}, r"top_p=0\.0: "),
        ({"top_p": 1.1}, r"top_p=1\.1: "),
        ({"top_p": None}, "top_p=None: "),
        ({"min_p": -0.1}, r"min_p=-0\.1: "),
        ({"min_p": True}, "min_p=True: "),
        ({"repetition_penalty": 0}, "repetition_penalty=0: "),
        ({"presence_penalty": 2.1}, r"presence_penalty=2\.1: "),
        ({"frequency_penalty": NAN}, "frequency_penalty=nan: "),
        ({"min_new_tokens": -1}, "min_new_tokens=-1: "),
        ({"min_new_tokens": 5}, "min_new_tokens=5: "),
        ({"suppress_tokens": [3]}, r"suppress_tokens=\[3\]: "),
        ({"suppress_tokens": (-3,)}, "token in suppress_tokens=-3: "),
        ({"bad_words_ids": [(3,)]}, r"bad_words_ids=\[\(3,\)\]: "),
        ({"bad_words_ids": ((),)}, r"bad_words_ids=\(\(\),\): "),
        ({"bad_words_ids": ([3],)}, r"word in bad_words_ids=\[3\]: "),
    ],
)
def test_a_bad_value_is_named_with_its_knob(knobs, message):
    with pytest.raises(RequestError, match=f"^{message}must be "):
        SamplingParams(**{"max_new_tokens": 4, **knobs})


def test_a_word_of_several_tokens_is_refused_and_told_what_to_do_instead():
    message = r"bad_words_ids: the word \(4, 7\) has 2 tokens, .* as separate words, or penalise"
    with pytest.raises(RequestError, match=message):
        SamplingParams(max_new_tokens=4, bad_words_ids=((3,), (4, 7)))


@pytest.mark.parametrize(
    ("knobs", "draw"),
    [
        ({}, Draw.PLAIN),
        ({"top_k": -1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}, Draw.PLAIN),
        ({"temperature": 0.3, "eos_token_ids": (2,)}, Draw.PLAIN),
        ({"min_new_tokens": 3}, Draw.PLAIN),  # no EOS, so nothing to suppress
        ({"top_k": 5}, Draw.FILTERED),
        ({"top_p": 0.99}, Draw.FILTERED),
        ({"min_p": 0.01}, Draw.FILTERED),
        ({"min_new_tokens": 3, "eos_token_ids": (2,)}, Draw.PENALISED),
        ({"suppress_tokens": (2,)}, Draw.PENALISED),
        ({"bad_words_ids": ((2,),)}, Draw.PENALISED),
        ({"bad_words_ids": ((2,),), "eos_token_ids": (2,)}, Draw.PLAIN),
        ({"repetition_penalty": 1.1, "top_k": 5}, Draw.PENALISED),
        ({"presence_penalty": -0.1}, Draw.PENALISED),
        ({"frequency_penalty": 0.1}, Draw.PENALISED),
    ],
    ids=str,
)
def test_a_draw_takes_no_more_than_was_asked(knobs, draw):
    assert SamplingParams(max_new_tokens=4, **knobs).draw is draw


def test_settings_of_no_effect_are_the_neutral_ones():
    request = Request(np.array([5, 6, 7]), SamplingParams(max_new_tokens=9, top_k=-1))
    assert request.settings == (*list(SETTINGS.values())[:-1], 3)


def test_token_flags_count_what_the_row_has_generated():
    sampling = SamplingParams(
        max_new_tokens=9, min_new_tokens=2, suppress_tokens=(4, 8), eos_token_ids=(5, 2)
    )
    flags = token_flags(3, Request(np.array([5, 4]), sampling), np.array([9, 5, 9]))
    assert flags.tolist() == [
        [3, 2, EOS],
        [3, 4, SEEN | SUPPRESSED],
        [3, 5, SEEN | EOS | COUNT_UNIT],
        [3, 8, SUPPRESSED],
        [3, 9, SEEN | 2 * COUNT_UNIT],
    ]


def test_a_rows_most_tokens_are_prompt_and_longest_completion():
    request = Request(np.array([5, 6, 7]), SamplingParams(max_new_tokens=9))
    assert request.max_tokens == 12
    assert request.seed == 0


def test_nouns_with_arrays_compare_by_identity():
    sampling = SamplingParams(max_new_tokens=1)
    one, other = (Request(np.array([1, 2]), sampling) for _ in range(2))
    assert one != other  # comparing arrays must not raise
    assert len({one, other}) == 2


def test_finish_reasons_are_vllms_words():
    assert {reason.value for reason in FinishReason} == {"stop", "length"}
    assert FinishReason.STOP == "stop"
    assert f"{FinishReason.LENGTH}" == "length"
