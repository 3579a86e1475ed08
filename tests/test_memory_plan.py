"""The memory plan's arithmetic and text."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollout.config import EngineConfig
from rollout.memory.plan import MemoryPlan, kv_limit

GIB = 2**30
SIZES = st.integers(0, 2**40)
SHARES = st.floats(0.01, 1.0)


def plan(config=None, **changes):
    sizes = {
        "device": "some GPU",
        "weights": 16 * GIB,
        "cast_weights": 8 * GIB,
        "graphs": GIB // 2,
        "buffers": GIB // 4,
        "workspaces": GIB,
        "states": 0,
        "num_lanes": 0,
        "kv_pages": 20 * GIB,
        "num_pages": 320,
        "kv_limit": 90 * GIB,
        "page": GIB // 16,
        "free": 100 * GIB,
        "config": config or EngineConfig(),
    }
    return MemoryPlan(**{**sizes, **changes})


@given(free=SIZES, reserve=st.none() | st.integers(1, 2**40), share=SHARES)
def test_pages_leave_the_reserve_and_the_rest_of_the_share_alone(free, reserve, share):
    config = EngineConfig(kv_fraction=share, train_reserve_bytes=reserve)
    limit = kv_limit(config, free)
    beside = max(0, free - (reserve or 0))
    assert 0 <= limit <= beside
    assert limit == pytest.approx(beside * share, abs=1 + free * 1e-9)
    assert kv_limit(config, free + 1000) >= limit


@given(free=st.none() | SIZES, kv_bytes=st.integers(1, 2**40))
def test_kv_bytes_has_the_last_word(free, kv_bytes):
    config = EngineConfig(kv_bytes=kv_bytes, kv_fraction=0.5, train_reserve_bytes=7)
    assert kv_limit(config, free) == kv_bytes


def test_nothing_limits_a_cpu():
    assert kv_limit(EngineConfig(train_reserve_bytes=7), None) is None


def test_pages_and_cast_weights_are_there_in_a_rollout_and_between_only_if_kept():
    assert plan().in_rollout == (8 + 0.5 + 0.25 + 1 + 20) * GIB
    assert plan().between_rollouts == 0.75 * GIB
    kept = plan(EngineConfig(kv_keep="always"))
    assert kept.in_rollout == plan().in_rollout
    assert kept.between_rollouts == kept.in_rollout - GIB  # torch owns a prefill's workspaces


def test_every_part_is_named_with_its_size_and_the_knob():
    text = str(plan(EngineConfig(train_reserve_bytes=2 * GIB, kv_fraction=0.8)))
    assert text.startswith("memory plan for some GPU: weights 16.000 GiB (the trainer's own), ")
    assert "cast weights 8.000 GiB" in text
    assert "KV pages 20.000 GiB (320 pages of 64 MiB; at most 90.00 GiB: kv_fraction=0.8" in text
    assert "training reserve 2.000 GiB (train_reserve_bytes)" in text
    assert "between rollouts 0.750 GiB (kv_keep='rollout')" in text
    assert "at most 9.00 GiB by kv_bytes" in str(
        plan(EngineConfig(kv_bytes=9 * GIB), kv_limit=9 * GIB)
    )
    assert "no limit" in str(plan(kv_limit=None, free=None))


@pytest.mark.parametrize("unused", [[], ["cast weights", "graphs"]], ids=str)
def test_the_table_has_the_same_lines_and_none_that_is_zero(unused):
    changed = plan(**{name.replace(" ", "_"): 0 for name in unused})
    console = Console(file=io.StringIO(), width=120)
    console.print(changed.table())
    printed = console.file.getvalue()
    assert "some GPU" in printed
    names = [line.name for line in plan().lines]
    assert len(names) == 8  # no training reserve
    assert [line.name for line in changed.lines] == [name for name in names if name not in unused]
    assert all(line.name in printed and line.gib in printed for line in changed.lines)
    assert not any(name in text for name in unused for text in (printed, str(changed)))
