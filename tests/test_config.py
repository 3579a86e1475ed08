"""Knobs are checked once, by name and value, and the tree of errors is the documented one."""

import copy
import inspect
import math
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest

from rollout import EngineConfig, RequestError, RolloutError, SamplingParams, errors
from rollout.errors import ConfigError, refuse_unknown
from trainers import RolloutConfig

LIMITS = ("max_row_tokens", "kv_bytes", "train_reserve_bytes")
COUNTS = ("max_rows", "page_tokens", "prefill_tokens", *LIMITS)
BAD_COUNTS = [0, -1, 1.0, math.nan, "8", True, (8,)]


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_from_1(name):
    assert getattr(EngineConfig(**{name: 1}), name) == 1
    for value in BAD_COUNTS if name in LIMITS else [*BAD_COUNTS, None]:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{name: value})
        assert str(caught.value) == f"{name}={value!r}: must be an integer >= 1"


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"offload_bytes": -1}, "offload_bytes=-1: must be an integer >= 0"),
        ({"offload_bytes": True}, "offload_bytes=True: must be an integer >= 0"),
        ({"num_slots": 3}, "num_slots=3: must be 1, 2 or None"),
        ({"num_slots": 2.0}, r"num_slots=2\.0: must be 1, 2 or None"),
        ({"kv_fraction": 0}, "kv_fraction=0: must be above 0 and at most 1"),
        ({"kv_fraction": 1.01}, r"kv_fraction=1\.01: must be above 0"),
        ({"kv_fraction": math.nan}, "kv_fraction=nan: must be above 0"),
        ({"kv_fraction": "x"}, "kv_fraction='x': must be above 0"),
        ({"kv_keep": "never"}, "kv_keep='never': must be 'rollout' or 'always'"),
        ({"on_policy": None}, "on_policy=None: must be 'close' or 'exact'"),
        ({"compile_layers": 1}, "compile_layers=1: must be True, False or None"),
        ({"fuse_projections": "yes"}, "fuse_projections='yes': must be True, False or None"),
        ({"self_check": None}, "self_check=None: must be True or False"),
        ({"entropies": 1}, "entropies=1: must be True or False"),
        ({"kept_mass": None}, "kept_mass=None: must be True or False"),
        ({"balance_ranks": "yes"}, "balance_ranks='yes': must be True or False"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_its_knob(knobs, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        RolloutConfig(**knobs)


def test_the_share_depends_on_who_else_needs_the_memory():
    assert EngineConfig().kv_share == 0.9
    assert EngineConfig(kv_keep="always").kv_share == 0.6
    assert EngineConfig(kv_keep="always", train_reserve_bytes=1).kv_share == 0.9
    assert EngineConfig(kv_keep="always", kv_fraction=0.3).kv_share == 0.3


@pytest.mark.parametrize(
    ("kind", "error", "name", "hint"),
    [
        (EngineConfig, ConfigError, "max_row", r"did you mean 'max_rows'\?"),
        (EngineConfig, ConfigError, "page_size", r"did you mean 'page_tokens'\?"),
        (EngineConfig, ConfigError, "KV_bytes", r"did you mean 'kv_bytes'\?"),
        (EngineConfig, ConfigError, "qqq", "it has .*kv_bytes, .*max_rows, .*train_reserve_bytes"),
        (EngineConfig, ConfigError, "trace", "it has compile_layers, .*"),
        (RolloutConfig, ConfigError, "max_row", r"did you mean 'max_rows'\?"),
        (RolloutConfig, ConfigError, "traces", r"did you mean 'trace'\?"),
        (SamplingParams, RequestError, "top_q", r"did you mean 'top_p'\?"),
        (SamplingParams, RequestError, "max_tokens", r"did you mean 'max_new_tokens'\?"),
        (SamplingParams, RequestError, "temprature", r"did you mean 'temperature'\?"),
        (SamplingParams, RequestError, "eos_token_id", r"did you mean 'eos_token_ids'\?"),
        (SamplingParams, RequestError, "qqq", "it has bad_words_ids, .*, max_new_tokens, .*"),
    ],
)
def test_an_unknown_name_gets_the_right_one(kind, error, name, hint):
    with pytest.raises(error, match=f"^{kind.__name__} has no '{name}'; {hint}$"):
        kind(**{name: 8})


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (EngineConfig(max_rows=3, kv_bytes=1 << 30), {"max_rows": 0}),
        (RolloutConfig(max_rows=3, trace="last"), {"trace": "on"}),
        (SamplingParams(max_new_tokens=3, top_k=2), {"max_new_tokens": 0}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_frozen_equal_by_value_and_checked_again_when_replaced(value, changes):
    with pytest.raises(FrozenInstanceError):
        value.max_rows = 4
    assert hash(value) == hash(copy.copy(value))
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == replace(value) == value
    with pytest.raises(RolloutError, match=r"=.*: .*must be"):
        replace(value, **changes)


def test_the_names_of_a_dataclass_stay_visible_and_are_inherited():
    @refuse_unknown(RequestError)
    @dataclass(frozen=True)
    class Mine(RolloutConfig):
        mine: int = 3

    assert {field.name for field in fields(RolloutConfig)} < set(inspect.signature(Mine).parameters)
    assert Mine(5, max_rows=4).mine == 5
    with pytest.raises(RequestError, match=r"Mine has no 'mime'; did you mean 'mine'\?"):
        Mine(mime=3)
    with pytest.raises(TypeError, match="positional"):
        RolloutConfig(8)


def test_the_tree_in_the_docstring_is_the_tree():
    lines = [line.split("|- ") for line in errors.__doc__.splitlines() if "|- " in line]
    drawn = {line[1].split()[0]: len(line[0]) for line in lines}
    ours = (c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception))
    classes = {error.__name__: error for error in ours}
    assert {*drawn, "RolloutError"} == set(classes)
    depth = {name: 1 + 4 * (classes[name].__mro__.index(RolloutError) - 1) for name in drawn}
    assert drawn == depth
    for line in lines:  # the builtin that an error also is
        if builtin := line[1].partition("(")[2].partition(")")[0]:
            assert builtin in [base.__name__ for base in classes[line[1].split()[0]].__mro__]
