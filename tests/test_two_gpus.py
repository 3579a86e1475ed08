"""The trainings of `test_ranks` on two processes with a GPU each (NCCL)."""

import pytest
from two_ranks import TRAININGS, check_learning, check_training, on_two_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def found_in(tmp_path_factory):
    return on_two_ranks(tmp_path_factory.mktemp("gpus"), TRAININGS, "cuda")


@pytest.mark.parametrize(
    ("kind", "wrapper", "most"),
    [
        ("ddp, balanced", "DistributedDataParallel", 1e-5),
        ("fsdp2", "FSDPQwen3ForCausalLM", 1e-5),
        ("fsdp2, lora", "FSDPPeftModel", 0.02),
    ],
)
def test_two_gpus_train_generate_different_rows_and_fail_together(found_in, kind, wrapper, most):
    assert {each["device"] for each in found_in[kind]} == {"cuda"}
    check_training(found_in[kind], kind, wrapper, most)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_gpus_learn_and_end_with_equal_weights(found_in, kind):
    check_learning(found_in[f"{kind} learns"], most=1e-3)
