"""Two processes on the CPU (gloo): each generates for itself, and both fail together."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.ranks import Group, deal

TESTS = Path(__file__).parent
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"
)

BALANCE = """
from accelerate import PartialState
from rollout.order import Lengths, digest
from rollout.request import Completion, FinishReason
from trainers.ranks import RowBalance
state = PartialState(cpu=True)
rank, lengths = state.process_index, Lengths()
# Each has three groups of four rows; rank 0 those that are long.
prompts = [[10 * rank + group] * 3 for group in range(3) for _ in range(4)]
seeds = [100 * rank + row for row in range(12)]
length_of = lambda prompt: (90, 80, 70, 12, 11, 10)[prompt[0] % 10 + 3 * (prompt[0] // 10)]
balance, loads, same = RowBalance(rank, 2, lengths), [], []
for _ in range(2):
    mine, mine_seeds = balance.give_out(prompts, seeds)
    loads.append(sum(map(length_of, mine)))
    done = []
    for row, (prompt, seed) in enumerate(zip(mine, mine_seeds)):
        tokens = [seed] * length_of(prompt)
        done.append(Completion(row, tokens, [0.0] * len(tokens), FinishReason.LENGTH, ()))
        lengths.note(digest(prompt), len(tokens))  # as the engine does of its own
    back = balance.take_back(done)
    same.append([(b.token_ids[0], len(b.token_ids)) for b in back])
known = [lengths.expected(digest([10 * r + g] * 3)) for r in range(2) for g in range(3)]
write({"loads": loads, "back": same, "known": known})
"""

BEGIN = """
import hashlib, json, os, sys, torch
from dataclasses import replace
from pathlib import Path
from peft import LoraConfig
torch.set_num_threads(1)
import run_length, trl_trainer
from rollout.sharded import whole

def digest(model):
    \"\"\"Of the weights, whole ones where they are sharded.\"\"\"
    found = hashlib.sha256()
    for parameter in model.parameters():
        with torch.no_grad(), whole(parameter, parameter.dtype) as numbers:
            found.update(numbers.float().numpy().tobytes())
    return found.hexdigest()

def spread(trainer):
    if "fsdp2" in kind:
        trl_trainer.shard(trainer)
    if kind.startswith("zero"):
        trl_trainer.use_zero(trainer, int(kind[4]))

def write(found):
    Path(folder, os.environ["RANK"] + ".json").write_text(json.dumps(found))

# Each has its own names and its own trainer, whose arguments make accelerate's state anew.
for folder, script, kind, precision in json.loads(Path(sys.argv[1]).read_text()):
    torch.manual_seed(0)  # whatever the one before it drew
    exec(compile(script, folder, "exec"), dict(globals()))
"""

TRAIN = """
adapters = LoraConfig(target_modules="all-linear", r=4) if "lora" in kind else None
trainer = trl_trainer.build(folder, max_steps=2, bf16=precision == "bf16", peft_config=adapters)
spread(trainer)
balanced = replace(trl_trainer.ENGINE, balance_ranks="balanced" in kind)
generator = trl_trainer.attach(trainer, balanced)
rank = trainer.accelerator.process_index
trainer.train()
found = {
    "wrapper": type(trainer.model_wrapped).__name__,
    "gap": max(trl_trainer.logged(trainer, "rollout/logp_gap")),
    "shadow": generator.engine.worker.twin.shadow_bytes,
    "completions": generator.generate([[9, 10]] * 4, None, 4)[1],
    "weights": digest(trainer.model),
}

# Ranks whose rows differ in number and length, and whose tool loops take different turns.
own, clock = [], generator._watch._clock
def turns():
    for _ in range(1 + 2 * rank):
        completions = generator.generate([[9, 10]] * (1 + 7 * rank), None, 1)[1]
        own.append(sum(map(len, completions)))
    return trainer.accelerator.gather(torch.ones(1)).sum().item()

before = clock._num_tokens
found["ranks"] = generator._share_version(turns)
found["own"], found["counted"] = sum(own), clock._num_tokens - before
if rank == 0:
    generator.engine.worker.graphs.forward.decode = None
try:
    generator.generate([[9]], None, 1)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
write(found)
"""

LEARN = """
from trl import GRPOConfig, GRPOTrainer
from rollout import RolloutConfig
from trainers import RolloutGenerator
tokenizer = run_length.build_tokenizer()
trainer = GRPOTrainer(
    model=run_length.build_model(tokenizer, seed=0),
    reward_funcs=run_length.reward,
    args=GRPOConfig(
        output_dir=folder, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=8, max_steps=30, learning_rate=3e-3, logging_steps=1,
        lr_scheduler_type="constant",
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=run_length.build_dataset(seed=0).filter(lambda row: len(row["answer"]) <= 6),
    processing_class=tokenizer,
)
spread(trainer)
RolloutGenerator(RolloutConfig(max_rows=64, page_tokens=16)).attach(trainer)
rank = trainer.accelerator.process_index
trainer.train()
rewards = trl_trainer.logged(trainer, "reward")
gap = max(trl_trainer.logged(trainer, "rollout/logp_gap_max"))
write({"rewards": rewards, "gap": gap, "weights": digest(trainer.model)})
"""


# Name -> script, kind of training, precision.
RUNS = {
    "balance": (BALANCE, "balance", "no"),
    "ddp, balanced": (TRAIN, "ddp, balanced", "no"),
    "fsdp2": (TRAIN, "fsdp2", "no"),
    "fsdp2, lora": (TRAIN, "fsdp2, lora", "bf16"),
    "ddp learns": (LEARN, "ddp", "no"),
    "fsdp2 learns": (LEARN, "fsdp2", "no"),
}

# Each in processes of its own: ZeRO-3 leaves a linear function of its own in torch.
ZERO_RUNS = {
    "zero2, balanced": (TRAIN, "zero2, balanced", "no"),
    "zero2, lora": (TRAIN, "zero2, lora", "bf16"),
    "zero3, balanced": (TRAIN, "zero3, balanced", "no"),
    "zero3, lora": (TRAIN, "zero3, lora", "bf16"),
    "zero2 learns": (LEARN, "zero2", "no"),
    "zero3 learns": (LEARN, "zero3", "no"),
}


def on_two_ranks(folder, runs):
    """What each of two processes has found in each of `runs`: a name's script, kind, precision.

    They share one pair of processes, of which most of the time goes into imports.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    for name in runs:
        (folder / name).mkdir()
    wanted = [(str(folder / name), *run) for name, run in runs.items()]
    (folder / "runs.json").write_text(json.dumps(wanted))
    (folder / "script.py").write_text(BEGIN)
    root = TESTS.parent
    paths = [root, TESTS, root / "examples", os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(folder / "script.py"), str(folder / "runs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, **environment, "DS_ACCELERATOR": "cpu"},
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return {
        name: [json.loads((folder / name / f"{rank}.json").read_text()) for rank in (0, 1)]
        for name in runs
    }


@pytest.fixture(scope="module")
def found_in(tmp_path_factory):
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), RUNS)


def found_of(name, found_in, folder):
    """What two processes have found in one run."""
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
        pytest.param("zero2, balanced", "DeepSpeedEngine", 1e-5, marks=needs_deepspeed),
        pytest.param("zero2, lora", "DeepSpeedEngine", 0.02, marks=needs_deepspeed),
        pytest.param("zero3, balanced", "DeepSpeedEngine", 1e-5, marks=needs_deepspeed),
        pytest.param("zero3, lora", "DeepSpeedEngine", 0.02, marks=needs_deepspeed),
    ],
)
def test_two_ranks_train_generate_different_rows_and_fail_together(
    found_in, tmp_path, kind, wrapper, most
):
    first, second = found_of(kind, found_in, tmp_path)
    for found in (first, second):
        assert found["wrapper"] == wrapper
        assert found["gap"] < most
        assert (found["shadow"] > 0) == kind.startswith(("fsdp2", "zero3"))
        assert found["ranks"] == 2
        assert found["counted"] == first["own"] + second["own"]
    assert first["weights"] == second["weights"]
    assert first["completions"] != second["completions"]
    assert first["error"].startswith("TypeError")
    other = "RolloutError: the rollout failed on 1 other rank(s); see their errors"
    assert second["error"] == other


def test_rows_are_shared_out_by_known_lengths_and_come_back_in_order(found_in):
    lengths = (90, 80, 70, 12, 11, 10)
    for rank, each in enumerate(found_in["balance"]):
        assert each["known"] == list(lengths)
        own = lengths[3 * rank : 3 * rank + 3]
        assert each["back"] == [[[100 * rank + row, own[row // 4]] for row in range(12)]] * 2
    first, then = zip(*(each["loads"] for each in found_in["balance"]), strict=True)
    assert first == (4 * 240, 4 * 33)  # nothing is known: each its own
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
    first, second = found_of(f"{kind} learns", found_in, tmp_path)
    assert first["weights"] == second["weights"]
    assert first["gap"] < 1e-4
    rewards = first["rewards"]
    print("reward", sum(rewards[:5]) / 5, "to", sum(rewards[-5:]) / 5)  # noqa: T201
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
