"""examples/grpo.py with the same arguments, and a line of JSON from every rank on what it did.

No test: what examples/README.md says of several GPUs was measured by it. From the environment:

PROMPTS=32     train on so many different prompts
SPREAD=10,320  completions of the prompts end by 10, 20, 40, .. 320 of the model's EOS ids, so that
               prompts differ in length
SHORT_LOSS=64  score and train the first so many tokens of each completion; rollouts are whole
FAIL_RANK=1    that rank's second rollout raises, before weights are gathered; with FAIL_LATE=1
               while rows decode
CPU_FSDP=1     shard on a CPU
"""

import json
import os
import time
from dataclasses import replace
from statistics import mean

import grpo
import run_length
import torch
import trl_trainer
from trl import GRPOTrainer

from rollout.sharded import whole

BEGAN = time.time()
ENV, GIB = os.environ, 2**30
RANK, SHORT, FAIL = (
    int(ENV.get(n, d)) for n, d in (("RANK", 0), ("SHORT_LOSS", 0), ("FAIL_RANK", -1))
)
SPREAD = [int(n) for n in ENV.get("SPREAD", "").split(",") if n]
ON_GPU = torch.cuda.is_available()
ROLLOUTS, FOUND = [], {"rank": RANK}
THE = {"prompts": {}}


def prompts(seed, size=2048, build=run_length.build_dataset):
    """So many different prompts; all of them where PROMPTS is not set."""
    rows, wanted = build(seed, size), int(ENV.get("PROMPTS", 0))
    firsts = {row["prompt"]: index for index, row in reversed(list(enumerate(rows)))}
    rows = rows.select(sorted(firsts.values())[:wanted]) if wanted else rows
    known = THE["prompts"]
    for text in rows["prompt"]:
        known.setdefault(tuple(run_length.VOCAB[letter] for letter in text), len(known))
    return rows


def reward(completion_ids, **columns):
    """Share of even ids: something to learn for weights that are random."""
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


class Generator(grpo.RolloutGenerator):
    def attach(self, trainer):
        super().attach(trainer)
        THE["before"] = digest(trainer.model)
        peak("torch_gib_begin", FOUND)
        self._generates, self._sleeps = self.engine.generate, self.engine.sleep
        self.engine.generate, self.engine.sleep = self._timed, self._seen
        return self

    def _sampling(self, prompt):
        sampling = super()._sampling(prompt)
        if not SPREAD:
            return sampling
        first, last = SPREAD
        place = THE["prompts"][tuple(token for token in prompt if token > 3)]
        ends = sampling.eos_token_ids[-(first << place % (last // first).bit_length()) :]
        return replace(sampling, eos_token_ids=ends)

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
    """Note the most that torch has had since last asked."""
    if ON_GPU:
        found[name] = round(torch.cuda.max_memory_allocated() / GIB, 2)
        torch.cuda.reset_peak_memory_stats()


def line(rollout):
    """What is told of a rollout."""
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
    """Of all bits of the weights and where they stand; sharded ones are gathered."""
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
