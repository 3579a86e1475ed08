"""Trainings on two processes, and checks of their results."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

BEGIN = """
import hashlib, json, os, sys, torch
from dataclasses import replace
from pathlib import Path
from peft import LoraConfig
torch.set_num_threads(1)
import rollout.model.weights, run_length, trainers.adapter.ranks, trl_trainer, wrappers
from accelerate.utils import gather_object
from rollout.model.weights import whole
from trainers.reporting.metrics import gap_metrics

def digest(model):
    \"\"\"Of the weights, whole ones where they are sharded.\"\"\"
    state = hashlib.sha256()
    for parameter in model.parameters():
        with torch.no_grad(), whole(parameter, parameter.dtype) as numbers:
            state.update(numbers.float().cpu().numpy().tobytes())
    return state.hexdigest()

def spread(trainer):
    if "fsdp2" in kind:
        trainer.model.to("cpu")  # where transformers leaves it for FSDP to move
        trl_trainer.shard(trainer)
    if kind.startswith("zero"):
        trl_trainer.use_zero(trainer, int(kind[4]))

def write(results):
    Path(folder, os.environ["RANK"] + ".json").write_text(json.dumps(results))

device, runs = json.loads(Path(sys.argv[1]).read_text())
on_cpu = device == "cpu"
# Each has its own names and its own trainer, whose arguments make accelerate's state anew.
for folder, script, kind, precision in runs:
    torch.manual_seed(0)  # whatever the one before it drew
    exec(compile(script, folder, "exec"), dict(globals()))
"""

TRAIN = """
adapters = LoraConfig(target_modules="all-linear", r=4) if "lora" in kind else None
model = {"model": wrappers.build("qwen3_5"), "processing_class": wrappers.processor()}
trainer = trl_trainer.build(
    folder, max_steps=2, bf16=precision == "bf16", peft_config=adapters, use_cpu=on_cpu,
    **(model if "qwen3_5" in kind else {}),
)
spread(trainer)
# Kernels of a GPU take no smaller pages; what compiled layers compute is for other tests.
config = replace(trl_trainer.ENGINE, page_tokens=4 if on_cpu else 16, compile_layers=False)
config = replace(config, balance_ranks="balanced" in kind)
generator = trl_trainer.attach(trainer, config)
rank = trainer.accelerator.process_index
trainer.train()
results = {
    "wrapper": type(trainer.model_wrapped).__name__,
    "gap": max(trl_trainer.logged(trainer, "rollout/logp_gap")),
    "shadow": (shadow := generator.engine.worker.twin.shadow_bytes),
    "whole": shadow / (4 * sum(parameter.numel() for parameter in trainer.model.parameters())),
    "completions": generator.generate([[9, 10]] * 4, None, 4)[1],
    "weights": digest(trainer.model),
}

# Ranks whose rows differ in number and length, and whose tool loops take different turns.
own, clock = [], generator._reporter._clock
def turns():
    for _ in range(1 + 2 * rank):
        completions = generator.generate([[9, 10]] * (1 + 7 * rank), None, 1)[1]
        own.append(sum(map(len, completions)))
    one = torch.ones(1, device=trainer.accelerator.device)
    return trainer.accelerator.gather(one).sum().item()

before = clock._steps[True].num_tokens
results["ranks"] = generator._share_version(turns)
results["own"], results["counted"] = sum(own), clock._steps[True].num_tokens - before
try:  # before rows are shared out
    generator.generate([[9]], ["image"] if rank == 1 else None, 1)
except Exception as error:
    results["first"] = f"{type(error).__name__}: {error}"
try:  # before weights are gathered
    if rank == 1:
        generator.engine._limits = None
    generator.generate([[9]], None, 1)
except Exception as error:
    results["early"] = f"{type(error).__name__}: {error}"
vars(generator.engine).pop("_limits", None)
whole, calls = rollout.model.weights.whole, []
def failing(*parameter):
    calls.append(parameter)
    if rank == 1 and len(calls) == 5:
        raise RuntimeError("no room for it")
    return whole(*parameter)
rollout.model.weights.whole = failing
try:  # while they are
    generator.generate([[9]], None, 1)
except Exception as error:
    results["amid"] = f"{type(error).__name__}: {error}"
rollout.model.weights.whole = whole
# Before a rollout, after it, as its completions come back, and as its memory is given back.
def broken(*args, **kwargs):
    raise MemoryError("on this rank alone")
def half_done(own):
    said, _ = gathers(own), exchanges.append(own)
    return said if len(exchanges) < 2 else broken()
def told():
    try:
        return generator._share_version(broken if place == "prompts" and rank else generates)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
generates, gathers, exchanges = (lambda: generator.generate([[9]], None, 1)[1]), gather_object, []
places = {"prompts": None, "log_rollout": generator._reporter, "_sleep": generator}
if "balanced" in kind:
    places["gather_object"] = trainers.adapter.ranks
results["late"] = {}
for place, owner in places.items():
    whole = getattr(owner, place, None)
    if rank and owner:
        setattr(owner, place, half_done if place == "gather_object" else broken)
    results["late"][place] = told()
    if owner:
        setattr(owner, place, whole)
rows = torch.zeros((2, 3), device=trainer.accelerator.device)
names = "sampling_per_token_logps prompt_ids completion_ids prompt_mask completion_mask"
whole = trainer._get_per_token_logps_and_entropies
trainer._get_per_token_logps_and_entropies = broken if rank else lambda *args: (rows,)
try:
    gap_metrics(trainer, dict.fromkeys(names.split(), rows), sample=True)
except Exception as error:
    results["gaps"] = f"{type(error).__name__}: {error}"
trainer._get_per_token_logps_and_entropies = whole
worker, forward = generator.engine.worker, generator.engine.worker.graphs.forward
worker.twin.compiled, worker._compiled_builds = True, 0
if rank == 1:  # whose compiler fails
    forward.warm_up = None
results["uncompiled"] = len(generator.generate([[9]], None, 1)[1])
if rank == 0:
    generator.engine.worker.graphs.run = None
try:
    generator.generate([[9]], None, 1)
except Exception as error:
    results["error"] = f"{type(error).__name__}: {error}"
results["device"] = trainer.accelerator.device.type
write(results)
"""

LEARN = """
from trl import GRPOConfig, GRPOTrainer
from trainers import RolloutConfig, RolloutGenerator
tokenizer = run_length.build_tokenizer()
trainer = GRPOTrainer(
    model=run_length.build_model(tokenizer, seed=0),
    reward_funcs=run_length.reward,
    args=GRPOConfig(
        output_dir=folder, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=8, max_steps=30, learning_rate=3e-3, logging_steps=1,
        lr_scheduler_type="constant",
        use_cpu=on_cpu, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=run_length.build_dataset(seed=0).filter(lambda row: len(row["answer"]) <= 6),
    processing_class=tokenizer,
)
spread(trainer)
config = RolloutConfig(max_rows=64, page_tokens=16, compile_layers=False)
RolloutGenerator(config).attach(trainer)
rank = trainer.accelerator.process_index
trainer.train()
rewards = trl_trainer.logged(trainer, "reward")
gap = max(trl_trainer.logged(trainer, "rollout/logp_gap_max"))
write({"rewards": rewards, "gap": gap, "weights": digest(trainer.model)})
"""


# Name -> script, kind of training, precision.
TRAININGS = {
    "ddp, balanced": (TRAIN, "ddp, balanced", "no"),
    "fsdp2": (TRAIN, "fsdp2", "no"),
    "fsdp2, lora": (TRAIN, "fsdp2, lora", "bf16"),
    "fsdp2, qwen3_5": (TRAIN, "fsdp2, qwen3_5", "no"),
    "ddp learns": (LEARN, "ddp", "no"),
    "fsdp2 learns": (LEARN, "fsdp2", "no"),
}


def on_two_ranks(folder, runs, device="cpu"):
    """Results of two processes for each of `runs`: name -> (script, kind, precision).

    On `cpu` they use gloo; on `cuda` each has a GPU and they use NCCL. All runs share one pair of
    processes, because most of the time goes into imports.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    for name in runs:
        (folder / name).mkdir()
    wanted = [(str(folder / name), *run) for name, run in runs.items()]
    (folder / "runs.json").write_text(json.dumps([device, wanted]))
    (folder / "script.py").write_text(BEGIN)
    root = TESTS.parent
    paths = [root, TESTS, root / "examples", os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    environment["DS_ACCELERATOR"] = device
    result = subprocess.run(
        [*command, str(folder / "script.py"), str(folder / "runs.json")],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
        timeout=400,
    )
    assert result.returncode == 0, result.stderr
    return {
        name: [json.loads((folder / name / f"{rank}.json").read_text()) for rank in (0, 1)]
        for name in runs
    }


def check_training(results, kind, wrapper, most):
    """Check a run of `TRAIN`; its largest mean gap must be below `most`."""
    first, second = results
    for each in results:
        assert each["wrapper"] == wrapper
        assert each["gap"] < most
        assert (each["shadow"] > 0) == kind.startswith(("fsdp2", "zero3"))
        assert each["whole"] < 0.9 or "qwen3_5" not in kind  # its vision tower is not gathered
        assert each["ranks"] == 2
        assert each["counted"] == first["own"] + second["own"]
    assert first["weights"] == second["weights"]
    assert first["completions"] != second["completions"]
    other = "RolloutError: the rollout failed on 1 other rank(s); see their errors"
    assert first["first"] == first["early"] == second["error"] == other
    assert second["first"].startswith("UnsupportedTrainer")
    assert second["early"].startswith("TypeError")
    assert first["uncompiled"] == second["uncompiled"] == 1
    if first["shadow"]:
        assert (first["amid"], second["amid"]) == (other, "RuntimeError: no room for it")
    assert first["error"].startswith("TypeError")
    assert set(first["late"].values()) == {other}
    assert {*second["late"].values(), second["gaps"]} == {"MemoryError: on this rank alone"}
    assert first["gaps"].endswith("could not be computed on 1 other rank(s); see their errors")


def check_learning(results, most=1e-4):
    """Check a run of `LEARN`; its largest gap must be below `most`."""
    first, second = results
    assert first["weights"] == second["weights"]
    assert first["gap"] < most
    rewards = first["rewards"]
    print("reward", sum(rewards[:5]) / 5, "to", sum(rewards[-5:]) / 5)  # noqa: T201
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
