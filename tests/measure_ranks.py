"""Run examples/grpo.py and print a line of JSON per rank. Measures the multi-GPU figures.

Not a test. Takes the arguments of examples/grpo.py, and reads from the environment:

PROMPTS=0:32   train on these prompts, all different
MEDIAN=1500    draw completion lengths: medians of prompts are log-normal around MEDIAN (sigma 0.7),
               completions of a prompt around its median (sigma 0.4); a rollout has the same lengths
               on any number of GPUs
SHORT_LOSS=64  score and train only the first 64 tokens of each completion; rollouts are whole
FAIL_RANK=1    this rank raises in its second rollout, before weights are gathered; with FAIL_LATE=1
               while rows decode
CPU_FSDP=1     shard on a CPU
"""

import json
import os
import time
from collections import Counter
from statistics import mean

import grpo
import numpy as np
import run_length
import torch
import trl_trainer
from trl import GRPOTrainer

from rollout.model.weights import whole

BEGAN = time.time()
ENV, GIB = os.environ, 2**30
RANK, SHORT, FAIL = (
    int(ENV.get(n, d)) for n, d in (("RANK", 0), ("SHORT_LOSS", 0), ("FAIL_RANK", -1))
)
MEDIAN = int(ENV.get("MEDIAN", 0))
ON_GPU = torch.cuda.is_available()
ROLLOUTS, FOUND = [], {"rank": RANK}
THE = {}


def prompts(seed, size=2048, build=run_length.build_dataset):
    """The prompts of PROMPTS, or every row of the dataset."""
    rows = build(seed, size)
    if "PROMPTS" not in ENV:
        return rows
    firsts = {row["prompt"]: index for index, row in reversed(list(enumerate(rows)))}
    first, last = map(int, ENV["PROMPTS"].split(":"))
    return rows.select(sorted(firsts.values())[first:last])


def reward(completion_ids, **columns):
    """Share of even ids, which random weights can learn to raise."""
    return [mean(token % 2 == 0 for token in ids) for ids in completion_ids]


class Trainer(GRPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        THE["trainer"] = self
        if ENV.get("CPU_FSDP"):
            trl_trainer.shard(self)

    def _generate(self, *batch):
        prompt_ids, ids, mask, texts, logprobs, *rest = super()._generate(*batch)
        if SHORT:
            ids, logprobs = ([row[:SHORT] for row in rows] for rows in (ids, logprobs))
        return prompt_ids, ids, mask, texts, logprobs, *rest


class DrawnLengths:
    """Ends each row at its drawn length."""

    def __init__(self, scheduler):
        self._adds, self._settles = scheduler.add, scheduler.settle
        scheduler.add, scheduler.settle = self._add, self._settle
        self._left, self._eos = np.zeros(0, np.int64), 0

    def _add(self, requests):
        ids = self._adds(requests)
        self._left = np.pad(self._left, (0, ids[-1] + 1 - len(self._left)))
        self._left[ids] = lengths([request.prompt.tolist() for request in requests])
        self._eos = requests[0].sampling.eos_token_ids[0]
        return ids

    def _settle(self, batch, tokens, scores):
        self._left[batch.rows] -= 1
        others = np.where(tokens == self._eos, self._eos + 1, tokens)
        return self._settles(batch, np.where(self._left[batch.rows] < 1, self._eos, others), scores)


def lengths(prompts):
    """Completion lengths of a rollout, independent of the number of ranks."""
    seen, drawn = Counter(), []
    for prompt in map(tuple, prompts):
        between = np.random.default_rng(prompt).normal(0, 0.7)
        within = np.random.default_rng([*prompt, len(ROLLOUTS), seen[prompt]]).normal(0, 0.4)
        drawn.append(max(1, int(MEDIAN * np.exp(between + within))))
        seen[prompt] += 1
    return drawn


class Generator(grpo.RolloutGenerator):
    def attach(self, trainer):
        super().attach(trainer)
        THE["before"] = digest(trainer.model)
        peak("torch_gib_begin", FOUND)
        self._generates, self._sleeps = self.engine.generate, self.engine.sleep
        if MEDIAN:
            DrawnLengths(self.engine.scheduler)
        self.engine.generate, self.engine.sleep = self._timed, self._seen
        return self

    def _timed(self, *args, **kwargs):
        if RANK == FAIL and len(ROLLOUTS) == 1:
            step, steps = self.engine.step, iter(range(5))
            self.engine.step = lambda: step() if next(steps, None) is not None else self._fail()
            if not ENV.get("FAIL_LATE"):
                self._fail()
        began = time.time()
        done = self._generates(*args, **kwargs)
        ROLLOUTS.append({"began": began, "ended": time.time(), "stats": self.engine.stats})
        return done

    def _fail(self):
        FOUND["raised_at"] = time.time()
        raise RuntimeError("made to fail")

    def _seen(self):
        if ON_GPU and ROLLOUTS:
            free, total = torch.cuda.mem_get_info()
            ROLLOUTS[-1]["used_gib"] = round((total - free) / GIB, 2)
            peak("torch_gib", ROLLOUTS[-1])
        self._sleeps()


def peak(name, found):
    """Note the peak of torch's memory since the last call."""
    if ON_GPU:
        found[name] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        torch.cuda.reset_peak_memory_stats()


def line(rollout):
    s = rollout.pop("stats")
    net = s.duration_s - s.warmup_s
    told = {
        "wall_s": rollout["ended"] - rollout["began"],
        "warmup_s": s.warmup_s,
        "net_s": net,
        "tokens": s.generated_tokens,
        "tok_s": s.generated_tokens / net,
        "steps": s.engine_steps,
        "rows": len(s.lengths),
        "lengths": [min(s.lengths), mean(s.lengths), max(s.lengths)],
        "stopped": s.num_stopped,
        "cast_gib": s.cast_bytes / GIB,
        "cast_ms": s.cast_s * 1e3,
        "pages": s.peak_pages,
        "free_pages": s.least_free_pages,
        "preemptions": s.preemptions,
        "kv_gib": s.mapped_bytes / GIB,
        "wake_ms": s.wake_s * 1e3,
        "sleep_ms": s.sleep_s * 1e3,
        "graphs": s.captured_graphs,
        "shares": s.time_shares,
    }
    return {**rollout, **json.loads(json.dumps(told), parse_float=lambda x: round(float(x), 3))}


@torch.no_grad()
def digest(model):
    """Hash all bits of the weights; sharded weights are gathered first."""
    total = 0
    for index, parameter in enumerate(model.parameters()):
        with whole(parameter, parameter.dtype) as numbers:
            kind = {2: torch.int16, 4: torch.int32}[numbers.itemsize]
            bits = numbers.detach().contiguous().view(kind).flatten().long()
            places = torch.arange(bits.numel(), device=bits.device) % 65_521 + 1
            total = (total * 1_000_003 + int((bits * places).sum()) + index) % 2**64
    return f"{total:016x}"


def main():
    run_length.build_dataset, run_length.reward, grpo.RolloutGenerator = prompts, reward, Generator
    try:
        grpo.main(trainer_class=Trainer)
        peak("torch_gib_training", FOUND)
        FOUND["weights"], FOUND["before"] = digest(THE["trainer"].model), THE["before"]
    except BaseException as error:
        FOUND.update(error=f"{type(error).__name__}: {error}"[:300], ended_at=time.time())
        raise
    finally:
        FOUND["rollouts"] = [line(rollout) for rollout in ROLLOUTS]
        FOUND["seconds"] = round(time.time() - BEGAN, 1)
        text = "RANK " + json.dumps(FOUND) + "\n"
        if RANK == 0 and "trainer" in THE:
            for entry in THE["trainer"].state.log_history:
                kept = {k: v for k, v in entry.items() if k.startswith(("rollout/", "sampling/"))}
                text += "LOG " + json.dumps(kept | {"reward": entry.get("reward")}) + "\n"
        os.write(1, ("\n" + text).encode())


main()
