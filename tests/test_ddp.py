"""Two processes on the CPU (gloo): each generates for itself, and both fail together."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

SCRIPT = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
import trl_trainer
trainer = trl_trainer.build(sys.argv[1], max_steps=2)
generator = trl_trainer.attach(trainer)
rank = trainer.accelerator.process_index
trainer.train()
found = {
    "wrapper": type(trainer.model_wrapped).__name__,
    "gap": max(trl_trainer.logged(trainer, "rollout/logp_gap")),
    "completions": generator.generate([[9, 10]] * 4, None, 4)[1],
}
if rank == 0:
    generator.engine.worker.graphs.forward.decode = None
try:
    generator.generate([[9]], None, 1)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
"""


def test_two_ranks_train_generate_different_rows_and_fail_together(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0"]
    (tmp_path / "script.py").write_text(SCRIPT)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    result = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        assert found["wrapper"] == "DistributedDataParallel"
        assert found["gap"] < 1e-5
    assert first["completions"] != second["completions"]
    assert first["error"].startswith("TypeError")
    other = "RolloutError: the rollout failed on 1 other rank(s); see their errors"
    assert second["error"] == other
