"""`python -m rollout doctor`."""

import subprocess
import sys

import pytest
import torch


def run_doctor():
    result = subprocess.run(
        [sys.executable, "-m", "rollout", "doctor"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says something else on a GPU")
def test_on_a_cpu_it_says_what_is_degraded_and_why():
    printed = run_doctor()
    findings = ("transformers", "trl", "wandb", "plain torch", "plain tensors", "no CUDA device")
    for finding in (torch.__version__.split("+")[0], *findings):
        assert finding in printed


@pytest.mark.gpu
def test_on_a_gpu_it_measures_and_finds_nothing_degraded():
    printed = run_doctor()
    findings = (
        "Triton",
        "virtual memory",
        "driver's counters",
        "TB/s",
        "GB/s",
        "self-check",
        "nothing",
    )
    for finding in (torch.cuda.get_device_name(), *findings):
        assert finding in printed
