"""An engine beside a training leaves losses and weights bit-identical."""

import pytest
import tiny
import torch
import trl_family
import trl_trainer


class Replay:
    """A generator that draws ids and log-probabilities from a fixed seed and runs no model."""

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


def trained(kind, tmp_path, *, beside, **changes):
    """Losses and final weights of 20 steps on replayed rollouts."""
    if kind == "GRPO":
        changes = {"vllm_importance_sampling_mode": "token_truncate", **changes}
    trainer = trl_family.build(kind, tmp_path, max_steps=20, **changes)
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
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return trl_trainer.logged(trainer, "loss"), weights


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GRPO", {}),
        ("GRPO", {"bf16": True}),
        ("GRPO", {"gradient_checkpointing": True, "num_iterations": 2}),
        ("RLOO", {}),
        ("RLOO", {"bf16": True}),
    ],
    ids=str,
)
def test_twenty_steps_give_bitwise_equal_losses_and_weights(tmp_path, kind, changes):
    losses, without = trained(kind, tmp_path / "without", beside=False, **changes)
    losses_beside, beside = trained(kind, tmp_path / "beside", beside=True, **changes)
    assert len(losses) == 20
    assert len(set(losses)) > 10
    assert losses_beside == losses
    start = dict(tiny.build().named_parameters())
    for name, weight in without.items():
        assert torch.equal(weight, beside[name]), name
    assert any(not torch.equal(weight, start[name]) for name, weight in without.items())
