"""Running the engine beside a training changes not one bit of the weights that come out."""

import pytest
import tiny
import torch
import trl_trainer


class Replay:
    """A generator that draws ids and log-probabilities from a fixed seed, and runs nothing."""

    llm = None

    def __init__(self):
        self._generator = torch.Generator().manual_seed(0)

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler=None):
        lengths = torch.randint(1, 10, (len(prompts),), generator=self._generator).tolist()
        ids = [torch.randint(8, 60, (n,), generator=self._generator).tolist() for n in lengths]
        logprobs = [[[-3.0 - 0.01 * i] for i in range(n)] for n in lengths]
        return prompts, ids, logprobs, None


def trained(tmp_path, *, beside, **changes):
    """Final weights of 20 GRPO steps on replayed rollouts, with or without an engine beside."""
    changes = {"vllm_importance_sampling_mode": "token_truncate", **changes}
    trainer = trl_trainer.build(tmp_path, max_steps=20, **changes)
    replay, rollouts = Replay(), []
    if beside:
        engine = trl_trainer.attach(trainer)
        generate = replay.generate

        def generate_beside(*args, **kwargs):
            rollouts.append(engine.generate(*args, **kwargs))
            return generate(*args, **kwargs)

        replay.generate = generate_beside
    trainer.vllm_generation, trainer._last_loaded_step, trainer.use_vllm = replay, -1, True
    trainer.train()
    assert len(rollouts) == (20 // changes.get("num_iterations", 1) if beside else 0)
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "changes", [{}, {"bf16": True}, {"gradient_checkpointing": True, "num_iterations": 2}], ids=str
)
def test_twenty_steps_end_in_bitwise_equal_weights(tmp_path, changes):
    without = trained(tmp_path / "without", beside=False, **changes)
    beside = trained(tmp_path / "beside", beside=True, **changes)
    start = dict(tiny.build().named_parameters())
    for name, weight in without.items():
        assert torch.equal(weight, beside[name]), name
    assert any(not torch.equal(weight, start[name]) for name, weight in without.items())
