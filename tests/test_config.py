"""Every knob is checked once, and every error on purpose has its place in the tree."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from rollout import errors
from rollout.config import RolloutConfig
from rollout.errors import ConfigError, RequestError, RolloutError, reject_unknown

NAN = float("nan")
COUNTS = [
    "max_rows",
    "max_row_tokens",
    "page_tokens",
    "kv_bytes",
    "prefill_tokens",
    "train_reserve_bytes",
]
BAD_COUNTS = [0, -1, 1.0, NAN, float("inf"), "8", True, False, (8,)]


def test_defaults():
    config = RolloutConfig()
    assert config.num_slots == 2
    assert config.max_row_tokens is config.kv_bytes is None
    assert not config.progress_bar


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_of_one_is_enough(name):
    assert getattr(RolloutConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize("name", COUNTS)
def test_a_bad_count_is_named_with_its_knob(name, value):
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(**{name: value})
    assert str(caught.value) == f"{name}={value!r}: it must be a whole number of at least 1"


@pytest.mark.parametrize("value", [-1, 1.0, NAN, "8", True])
def test_host_memory_may_be_none_at_all(value):
    assert [RolloutConfig(offload_bytes=n).offload_bytes for n in (None, 0, 8)] == [None, 0, 8]
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(offload_bytes=value)
    assert str(caught.value) == f"offload_bytes={value!r}: it must be a whole number of at least 0"


@pytest.mark.parametrize("name", ["max_rows", "page_tokens", "prefill_tokens"])
def test_only_limits_may_be_none(name):
    with pytest.raises(ConfigError, match=f"^{name}=None: "):
        RolloutConfig(**{name: None})


@pytest.mark.parametrize("value", [0, -0.1, 1.01, NAN, float("inf")])
def test_a_share_is_above_0_and_at_most_1(value):
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(kv_fraction=value)
    assert str(caught.value) == f"kv_fraction={value!r}: it must be above 0 and at most 1"
    assert [RolloutConfig(kv_fraction=share).kv_fraction for share in (0.01, 1)] == [0.01, 1]


def test_the_share_depends_on_who_else_needs_the_memory():
    assert RolloutConfig().kv_share == 0.9
    assert RolloutConfig(kv_keep="always").kv_share == 0.6
    assert RolloutConfig(kv_keep="always", train_reserve_bytes=1).kv_share == 0.9
    assert RolloutConfig(kv_keep="always", kv_fraction=0.3).kv_share == 0.3


@pytest.mark.parametrize("value", ["never", None, True])
def test_pages_are_kept_for_a_rollout_or_always(value):
    with pytest.raises(ConfigError, match=f"^kv_keep={value!r}: it must be 'rollout' or 'always'"):
        RolloutConfig(kv_keep=value)


@pytest.mark.parametrize("value", [0, 3, -1, NAN, "2", None])
def test_slots_are_one_or_two(value):
    with pytest.raises(ConfigError, match=f"^num_slots={value!r}"):
        RolloutConfig(num_slots=value)
    assert [RolloutConfig(num_slots=n).num_slots for n in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_row", r"did you mean 'max_rows'\?"),
        ("num_slot", r"did you mean 'num_slots'\?"),
        ("page_size", r"did you mean 'page_tokens'\?"),
        ("prefil_tokens", r"did you mean 'prefill_tokens'\?"),
        ("KV_bytes", r"did you mean 'kv_bytes'\?"),
        ("qqq", "it has .*kv_bytes, .*max_row_tokens, max_rows, .*train_reserve_bytes"),
    ],
)
def test_an_unknown_name_gets_the_right_one(name, hint):
    with pytest.raises(ConfigError, match=f"^RolloutConfig has no '{name}'; {hint}$"):
        RolloutConfig(**{"max_rows": 4, name: 8})


def test_frozen_and_equal_by_value():
    config = RolloutConfig(max_rows=3, kv_bytes=1 << 30)
    with pytest.raises(FrozenInstanceError):
        config.max_rows = 4
    assert config == RolloutConfig(kv_bytes=1 << 30, max_rows=3)
    assert hash(config) == hash(copy.copy(config))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_replace_checks_again():
    config = RolloutConfig(max_rows=3)
    assert replace(config, num_slots=1).max_rows == 3
    with pytest.raises(ConfigError, match="max_rows=0"):
        replace(config, max_rows=0)


def test_every_knob_is_explained():
    source = inspect.getsource(RolloutConfig)
    for field in fields(RolloutConfig):
        _, _, rest = source.partition(f"\n    {field.name}: ")
        assert rest.splitlines()[1].strip().startswith('"""'), f"{field.name} has no docstring"


# --- errors


def test_the_tree_in_the_docstring_is_the_tree():
    lines = [line.split("|- ") for line in errors.__doc__.splitlines() if "|- " in line]
    drawn = {line[1].split()[0]: len(line[0]) for line in lines}
    ours = (c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, Exception))
    classes = {error.__name__: error for error in ours}
    assert {*drawn, "RolloutError"} == set(classes)
    depth = {name: 1 + 4 * (classes[name].__mro__.index(RolloutError) - 1) for name in drawn}
    assert drawn == depth


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.RequestError, ValueError),
        (errors.OutOfMemory, MemoryError),
        (errors.UnsupportedModel, NotImplementedError),
        (errors.UnsupportedTrainer, NotImplementedError),
    ],
)
def test_an_error_is_also_the_builtin_that_callers_know(error, builtin):
    assert issubclass(error, builtin)
    assert issubclass(error, RolloutError)


def test_unknown_names_raise_the_error_asked_for():
    reject_unknown(ConfigError, "Owner", [], [])
    reject_unknown(ConfigError, "Owner", iter(["rows"]), iter(["rows", "pages"]))
    with pytest.raises(RequestError, match=r"^Owner has no 'row'; did you mean 'rows'\?$"):
        reject_unknown(RequestError, "Owner", ["pages", "row", "page"], iter(["rows", "pages"]))
    with pytest.raises(ConfigError, match=r"^Owner has no 'x'; it has pages, rows$"):
        reject_unknown(ConfigError, "Owner", ["x"], ["rows", "pages"])
