"""What a request may ask for, and what the nouns promise."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from rollout.errors import RequestError, RolloutError
from rollout.request import Admission, Batch, FinishReason, Request, SamplingParams

NAN = float("nan")


def test_defaults():
    sampling = SamplingParams(max_new_tokens=1)
    assert (sampling.temperature, sampling.eos_token_ids) == (1.0, ())


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
        ({"temperature": -0.1}, r"temperature=-0\.1: "),
        ({"temperature": NAN}, "temperature=nan: "),
        ({"temperature": float("inf")}, "temperature=inf: "),
    ],
)
def test_a_bad_value_is_named_with_its_knob(knobs, message):
    with pytest.raises(RequestError, match=f"^{message}it must be "):
        SamplingParams(**{"max_new_tokens": 4, **knobs})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_tokens", r"did you mean 'max_new_tokens'\?"),
        ("temprature", r"did you mean 'temperature'\?"),
        ("eos_token_id", r"did you mean 'eos_token_ids'\?"),
        ("qqq", "it has eos_token_ids, max_new_tokens, temperature"),
    ],
)
def test_an_unknown_name_gets_the_right_one(name, hint):
    with pytest.raises(RequestError, match=f"^SamplingParams has no '{name}'; {hint}$"):
        SamplingParams(**{"max_new_tokens": 4, name: 1})


def test_a_bad_request_is_a_value_error_too():
    assert issubclass(RequestError, ValueError)
    assert issubclass(RequestError, RolloutError)


def test_sampling_params_are_frozen_and_compare_by_value():
    sampling = SamplingParams(max_new_tokens=4, eos_token_ids=(2,))
    with pytest.raises(FrozenInstanceError):
        sampling.temperature = 0.0
    assert sampling == SamplingParams(eos_token_ids=(2,), max_new_tokens=4)
    assert hash(sampling) == hash(copy.copy(sampling))
    assert pickle.loads(pickle.dumps(sampling)) == copy.deepcopy(sampling) == sampling


def test_replace_checks_again():
    sampling = SamplingParams(max_new_tokens=4)
    assert replace(sampling, temperature=0.0).max_new_tokens == 4
    with pytest.raises(RequestError, match="max_new_tokens=0"):
        replace(sampling, max_new_tokens=0)


def test_a_rows_most_tokens_are_prompt_and_longest_completion():
    request = Request(np.array([5, 6, 7]), SamplingParams(max_new_tokens=9))
    assert request.max_tokens == 12
    assert request.seed == 0


def test_nouns_with_arrays_compare_by_identity():
    sampling = SamplingParams(max_new_tokens=1)
    one, other = (Request(np.array([1, 2]), sampling) for _ in range(2))
    assert one != other  # and no error from comparing arrays
    assert len({one, other}) == 2


def test_admissions_share_nothing():
    one, other = Admission(), Admission()
    one.lanes.append(3)
    assert other.lanes == []


def test_a_batch_is_not_changed_after_launch():
    no_ints = np.empty(0, np.int64)
    pages, pairs = np.empty((0, 3), np.int64), np.empty((0, 2), np.int64)
    batch = Batch(no_ints, no_ints, 1, 0, Admission(), [], pages, pairs, pairs, pairs, 0, 0)
    assert batch.num_prefilled == 0
    with pytest.raises(FrozenInstanceError):
        batch.policy_version = 2


def test_finish_reasons_are_vllms_words():
    assert {reason.value for reason in FinishReason} == {"stop", "length"}
    assert FinishReason.STOP == "stop"
    assert f"{FinishReason.LENGTH}" == "length"
