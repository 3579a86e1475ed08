"""PPO on two CPU processes (gloo) learns as on one: policy, critic and metrics."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_critic
import test_ppo
import test_value_model
import torch
from torch.nn.functional import pad

TESTS = Path(__file__).parent
KINDS = ("model", "adapter", "head")
STEPS, ROWS = 3, 8
# For the policy and the critic, whose weights move by more than 1e-2. Sums over rows round in
# another order: a difference of 1e-7 with SGD, which Adam amplifies in the critic.
TOLERANCES = (1e-6, 5e-5)

SCRIPT = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
import test_ppo_ranks
folder = Path(sys.argv[1])
rank, results = test_ppo_ranks.learn(folder)
torch.save(results, folder / f"{rank}.pt")
"""


def learn(folder):
    """Results of this rank: a critic alone, and a trainer with each kind of critic."""
    critic, rollout = test_critic.build(), test_critic.batch()
    rank, count = critic.accelerator.process_index, critic.accelerator.num_processes
    half = test_critic.ROWS // count
    logged = critic.learn(rollout.rows(torch.arange(rank * half, (rank + 1) * half)))
    results = {"critic": test_critic.parameters(critic), "logged": logged}
    for kind in KINDS:
        results[kind] = train(folder / f"{kind}-{count}", kind, rank, count)
    return rank, results


def train(folder, kind, rank, count):
    """The whole trainer on this rank's share of eight rows a step.

    Seeds depend on a row's place among all rows, so one and two ranks draw the same completions.
    """
    own = ROWS // count
    trainer = test_ppo.build(
        folder,
        critic=kind,
        peft_config=None if kind == "model" else test_value_model.LORA,
        per_device_train_batch_size=own,
        optim="sgd",
        learning_rate=0.1,
        value_learning_rate=1e-2,
        value_lr_scheduler_type="linear",
        max_steps=STEPS,
    )
    trainer.vllm_generation._seeds.draw = lambda num_rows: [
        1000 * trainer.state.global_step + rank * own + row for row in range(num_rows)
    ]
    before, rollouts = weights(trainer), test_ppo.rollouts_of(trainer)
    trainer.train()
    names = ("completion_ids", "completion_mask", "advantages")
    return {
        "wrapper": type(trainer.critic.model).__name__,
        "before": before,
        "weights": weights(trainer),
        "rows": [[rollout[name] for name in names] for rollout in rollouts],
    }


def weights(trainer):
    return [test_ppo.weights(model) for model in (trainer.model, trainer.critic.model)]


def on_two_ranks(tmp_path):
    (tmp_path / "learn.py").write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    paths = [str(folder) for folder in (TESTS.parent, TESTS, TESTS.parent / "examples")]
    result = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "learn.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]


def together(ranks, width):
    """Rows of both ranks, one after the other, padded to `width`."""
    return [
        torch.cat([pad(x, (0, width - x.shape[1])) for x in both])
        for both in zip(*ranks, strict=True)
    ]


@pytest.mark.slow
def test_two_ranks_learn_as_one_does_with_all_rows(tmp_path):
    (_, alone), ranks = learn(tmp_path), on_two_ranks(tmp_path)
    for rank in ranks:
        torch.testing.assert_close(rank["critic"], alone["critic"], atol=2e-5, rtol=1e-4)
        assert rank["logged"] == pytest.approx(alone["logged"], rel=1e-4)
    for kind in KINDS:
        one, two = alone[kind], [rank[kind] for rank in ranks]
        assert {rank["wrapper"] for rank in two} == {"DistributedDataParallel"}
        for step in range(STEPS):
            ids, mask, advantages = one["rows"][step]
            rows = together([rank["rows"][step] for rank in two], mask.shape[1])
            assert torch.equal(rows[1], mask)
            assert torch.equal(rows[0] * mask, ids * mask)
            # Whitening spans both ranks, so one rank's mean is not 0.
            torch.testing.assert_close(rows[2], advantages, atol=1e-5, rtol=1e-5)
            assert abs(two[0]["rows"][step][2].sum()) > 1e-2
        for place, tolerance in enumerate(TOLERANCES):
            end = one["weights"][place]
            assert (end - one["before"][place]).abs().max() > 1e-2
            for rank in two:
                torch.testing.assert_close(rank["weights"][place], end, atol=tolerance, rtol=0)
            assert torch.equal(two[0]["weights"][place], two[1]["weights"][place])
