"""PPO on two processes of a CPU (gloo): one critic, and one mean and variance over both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent

LEARN = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
import test_critic, test_ppo
folder = Path(sys.argv[1])

# The critic: each rank has its half of the rows, or one rank all of them.
critic = test_critic.build()
rank, count = critic.accelerator.process_index, critic.accelerator.num_processes
half = test_critic.ROWS // count
whole = test_critic.batch()
logged = critic.learn(whole.rows(torch.arange(rank * half, (rank + 1) * half)))

trainer = test_ppo.build(folder / str(count), max_steps=2)
found = test_ppo.rollouts_of(trainer)
trainer.train()
sums = [scored["advantages"].sum().item() for scored in found]
torch.save(
    {
        "critic": test_critic.parameters(critic),
        "logged": logged,
        "policy": test_ppo.weights(trainer.model),
        "values": test_ppo.weights(trainer.critic.model),
        "sums": sums,
        "squares": [scored["advantages"].square().sum().item() for scored in found],
        "tokens": [scored["completion_mask"].sum().item() for scored in found],
    },
    folder / f"{count}-{rank}.pt",
)
"""


def run(tmp_path, num_processes):
    """What each rank found."""
    script = tmp_path / "learn.py"
    script.write_text(LEARN)
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={num_processes}"]
    paths = [str(folder) for folder in (TESTS.parent, TESTS, TESTS.parent / "examples")]
    result = subprocess.run(
        [sys.executable, *launcher, "--standalone", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [torch.load(tmp_path / f"{num_processes}-{n}.pt") for n in range(num_processes)]


@pytest.mark.slow
def test_two_ranks_have_one_critic_which_learns_as_on_one(tmp_path):
    (alone,), ranks = run(tmp_path, 1), run(tmp_path, 2)
    for rank in ranks:
        torch.testing.assert_close(rank["critic"], alone["critic"], atol=2e-5, rtol=1e-4)
        assert rank["logged"] == pytest.approx(alone["logged"], rel=1e-4)
    for name in ("policy", "values"):
        assert torch.equal(ranks[0][name], ranks[1][name])
    for step in range(2):
        sums, squares, tokens = (
            sum(rank[name][step] for rank in ranks) for name in ("sums", "squares", "tokens")
        )
        assert sums / tokens == pytest.approx(0, abs=1e-5)
        assert squares / tokens == pytest.approx(1, abs=1e-3)
        assert abs(ranks[0]["sums"][step]) > 1e-2  # no rank is whitened by itself
