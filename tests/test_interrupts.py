"""Ctrl-C during a rollout: the trainer can save, resume and train again."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
import tiny
import torch
import trl_family
import trl_trainer
from transformers import AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine, SamplingParams

TESTS = Path(__file__).parent
KEPT = replace(trl_trainer.ENGINE, kv_keep="always")

SIGINT = """
import json, signal, sys, time, torch
from pathlib import Path
torch.set_num_threads(1)
import tiny, trl_trainer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
folder = Path(sys.argv[1])
trainer = trl_trainer.build(folder, max_steps=2, max_completion_length=200)
generator = trl_trainer.attach(trainer)
trainer.eos_token_ids = []
forward, steps, found = generator.engine.worker.graphs.forward, [], {}
decode = forward.decode

def telling(*args):
    steps.append(args)
    if len(steps) == 20:
        print("in a rollout", flush=True)
    if len(steps) > 20 and not found:
        time.sleep(0.05)  # the signal may be long in coming
    return decode(*args)

forward.decode = telling
try:
    trainer.train()
except KeyboardInterrupt:
    found["interrupted_after"] = len(steps)
found["busy"] = generator.engine.busy
trainer.save_model(folder / "saved")
trainer.train()
found["step"] = trainer.state.global_step
found["gap"] = max(trl_trainer.logged(trainer, "rollout/logp_gap_max"))
(folder / "found.json").write_text(json.dumps(found))
"""

ONE_RANK = """
import sys, torch
torch.set_num_threads(1)
import trl_trainer
trainer = trl_trainer.build(sys.argv[1])
generator = trl_trainer.attach(trainer)

def interrupted(*args):
    raise KeyboardInterrupt

if trainer.accelerator.process_index == 0:
    generator.engine.worker.graphs.forward.decode = interrupted
trainer.train()
"""


@contextmanager
def interrupt_in(generator, global_step):
    """Raise Ctrl-C in the third decode step of this optimizer step's rollout."""
    forward, decoded = generator.engine.worker.graphs.forward, []
    decode = forward.decode

    def interrupted(*args):
        decoded.append(generator._trainer.state.global_step)
        if decoded.count(global_step) == 3:
            raise KeyboardInterrupt
        return decode(*args)

    forward.decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        yield
    forward.decode = decode


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("kind", "config"), [("GRPO", trl_trainer.ENGINE), ("RLOO", KEPT)], ids=["GRPO", "RLOO-kept"]
)
def test_the_engine_is_idle_and_the_weights_are_what_they_were(tmp_path, kind, config):
    trainer = trl_family.build(kind, tmp_path)
    generator = trl_trainer.attach(trainer, config)
    gaps = trl_family.watch_gaps(trainer, generator)
    before = weights_of(trainer.model)
    with interrupt_in(generator, global_step=0):
        trainer.train()
    engine = generator.engine
    assert not engine.busy
    assert engine.scheduler.pages.num_used == 0
    assert engine.asleep == (config is not KEPT)
    assert equal(before, weights_of(trainer.model))
    generator.generate([[9, 10]] * 4, None, 4)
    assert len(gaps) == 4
    trainer.train()
    assert trainer.state.global_step == 3
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(
    ("saved", "again"), [("before", "new trainer"), ("after", "same trainer")], ids=str
)
def test_what_is_resumed_ends_as_if_it_had_not_been_interrupted(
    tmp_path, saved, again, no_memory_of_lengths
):
    """From a checkpoint before the interrupt, and from one saved after it."""

    def build(name):
        saves = {"save_strategy": "steps", "save_steps": 1} if saved == "before" else {}
        trainer = trl_trainer.build(tmp_path / name, max_steps=4, **saves)
        return trainer, trl_trainer.attach(trainer)

    whole, _ = build("whole")
    whole.train()
    trainer, generator = build("interrupted")
    with interrupt_in(generator, global_step=2):
        trainer.train()
    assert trainer.state.global_step == 2
    trainer.save_model(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert equal(weights_of(trainer.model), weights_of(loaded))
    if saved == "after":
        trainer._save_checkpoint(trainer.model, trial=None)
    if again == "new trainer":
        trainer, _ = build("interrupted")
    trainer.train(resume_from_checkpoint=str(tmp_path / "interrupted/checkpoint-2"))
    assert trainer.state.global_step == 4
    assert equal(weights_of(whole.model), weights_of(trainer.model))
    losses = trl_trainer.logged(whole, "loss")
    assert trl_trainer.logged(trainer, "loss")[-2:] == losses[-2:]


def start(script, tmp_path, *launcher):
    """Run a function of this file as a script in its own process."""
    (tmp_path / "script.py").write_text(script)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return subprocess.Popen(
        [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_signal_from_outside_does_the_same(tmp_path):
    process = start(SIGINT, tmp_path)
    assert "in a rollout\n" in iter(process.stdout.readline, "")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads((tmp_path / "found.json").read_text())
    assert 20 <= found["interrupted_after"] < 400
    assert not found["busy"]
    start_weights = weights_of(tiny.build())
    assert equal(
        start_weights, weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    )
    assert found["step"] == 2
    assert found["gap"] < 1e-4


@pytest.mark.slow
def test_an_interrupt_of_one_rank_ends_the_run(tmp_path):
    """The rank does not wait for the others; the launcher ends them."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    process = start(ONE_RANK, tmp_path, *launcher)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors


@pytest.mark.slow
def test_an_interrupt_may_come_at_any_line(no_memory_of_lengths):
    """Including lines that prepare memory and cast weights (bf16 autocast)."""
    work = tiny.prompts(4), SamplingParams(max_new_tokens=2)
    config = EngineConfig(max_rows=3, page_tokens=4, prefill_tokens=16, num_slots=2)
    with RolloutEngine(tiny.build(), config, autocast_dtype=torch.bfloat16) as engine:
        wanted = [(c.token_ids, c.logprobs) for c in engine.generate(*work)]
        engine.sleep()
        with fakes.interrupt_at_line(-1) as passed:
            engine.generate(*work)
        for number in range(1, passed[0], passed[0] // 30):
            engine.sleep()
            with pytest.raises(KeyboardInterrupt), fakes.interrupt_at_line(number):
                engine.generate(*work)
            assert not engine.busy
            engine.sleep()
            assert [(c.token_ids, c.logprobs) for c in engine.generate(*work)] == wanted
        engine.scheduler.check()
