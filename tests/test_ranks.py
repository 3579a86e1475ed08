"""Two CPU processes (gloo): each generates for itself, and both fail together."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st
from two_ranks import LEARN, TRAIN, TRAININGS, check_learning, check_training, on_two_ranks

from trainers.adapter.ranks import Group, deal

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"
)

BALANCE = """
from types import SimpleNamespace
from accelerate import PartialState
from rollout.scheduler.waiting import Lengths, digest
from rollout.request import Completion, FinishReason
from trainers.adapter.ranks import RolloutCollectives
state, lengths = PartialState(cpu=True), Lengths()
engine, rank = SimpleNamespace(expected_lengths=lengths, num_gathered=0), state.process_index
# Each has three groups of four rows; rank 0 those that are long.
prompts = [[10 * rank + group] * 3 for group in range(3) for _ in range(4)]
seeds = [100 * rank + row for row in range(12)]
length_of = lambda prompt: (90, 80, 70, 12, 11, 10)[prompt[0] % 10 + 3 * (prompt[0] // 10)]
loads, same, phases = [], [], []
for _ in range(2):
    collectives = RolloutCollectives(state, engine, balance=True)
    phases.append(collectives.phase.name)
    mine, mine_seeds = collectives.distribute(prompts, seeds)
    phases.append(collectives.phase.name)
    loads.append(sum(map(length_of, mine)))
    done = []
    for row, (prompt, seed) in enumerate(zip(mine, mine_seeds)):
        tokens = [seed] * length_of(prompt)
        done.append(Completion(row, tokens, [0.0] * len(tokens), FinishReason.LENGTH, ()))
        lengths.note(digest(prompt), len(tokens))  # as the engine does of its own
    back = collectives.collect(done)
    phases.append(collectives.phase.name)
    same.append([(b.token_ids[0], len(b.token_ids)) for b in back])
known = [lengths.expected(digest([10 * r + g] * 3)) for r in range(2) for g in range(3)]
write({"loads": loads, "back": same, "known": known, "phases": phases})
"""

RUNS = {"balance": (BALANCE, "balance", "no"), **TRAININGS}

# Each in its own processes, because ZeRO-3 patches torch's linear function for good.
ZERO_RUNS = {
    "zero2, balanced": (TRAIN, "zero2, balanced", "no"),
    "zero2, lora": (TRAIN, "zero2, lora", "bf16"),
    "zero3, balanced": (TRAIN, "zero3, balanced", "no"),
    "zero3, lora": (TRAIN, "zero3, lora", "bf16"),
    "zero2 learns": (LEARN, "zero2", "no"),
    "zero3 learns": (LEARN, "zero3", "no"),
}


@pytest.fixture(scope="module")
def found_in(tmp_path_factory):
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), RUNS)


def found_of(name, found_in, folder):
    """Results of two processes for one run."""
    if name in found_in:
        return found_in[name]
    return on_two_ranks(folder, {name: ZERO_RUNS[name]})[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrapper", "most"),
    [
        ("ddp, balanced", "DistributedDataParallel", 1e-5),
        ("fsdp2", "FSDPQwen3ForCausalLM", 1e-5),
        ("fsdp2, lora", "FSDPPeftModel", 0.02),
        ("fsdp2, qwen3_5", "FSDPQwen3_5ForConditionalGeneration", 1e-5),
        pytest.param("zero2, balanced", "DeepSpeedEngine", 1e-5, marks=needs_deepspeed),
        pytest.param("zero2, lora", "DeepSpeedEngine", 0.02, marks=needs_deepspeed),
        pytest.param("zero3, balanced", "DeepSpeedEngine", 1e-5, marks=needs_deepspeed),
        pytest.param("zero3, lora", "DeepSpeedEngine", 0.02, marks=needs_deepspeed),
    ],
)
def test_two_ranks_train_generate_different_rows_and_fail_together(
    found_in, tmp_path, kind, wrapper, most
):
    check_training(found_of(kind, found_in, tmp_path), kind, wrapper, most)


def test_rows_are_shared_out_by_known_lengths_and_come_back_in_order(found_in):
    lengths = (90, 80, 70, 12, 11, 10)
    for rank, each in enumerate(found_in["balance"]):
        assert each["known"] == list(lengths)
        own = lengths[3 * rank : 3 * rank + 3]
        assert each["phases"] == ["DISTRIBUTING", "GENERATING", "REPORTING"] * 2
        assert each["back"] == [[[100 * rank + row, own[row // 4]] for row in range(12)]] * 2
    first, then = zip(*(each["loads"] for each in found_in["balance"]), strict=True)
    assert first == (4 * 240, 4 * 33)  # lengths are unknown: each rank keeps its rows
    assert sorted(then) == [4 * (90 + 12 + 11 + 10), 4 * (80 + 70)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 500)), max_size=40))
def test_no_rank_has_more_than_the_least_and_one_group(drawn):
    groups = [Group(owner, 0, [7], [0] * rows, size) for owner, rows, size in drawn]
    dealt = deal(groups, 4)
    assert sorted(map(id, groups)) == sorted(id(group) for rank in dealt for group in rank)
    loads = [sum(len(g.seeds) * (g.expected or 0) for g in rank) for rank in dealt]
    largest = max((len(g.seeds) * (g.expected or 0) for g in groups), default=0)
    assert max(loads) - min(loads) <= largest


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "fsdp2",
        pytest.param("zero2", marks=needs_deepspeed),
        pytest.param("zero3", marks=needs_deepspeed),
    ],
)
def test_two_ranks_learn_and_end_with_equal_weights(found_in, tmp_path, kind):
    check_learning(found_of(f"{kind} learns", found_in, tmp_path))
