"""Evaluation between training steps has its own metrics and rollouts and changes nothing."""

import pytest
import tiny
import torch
import trl_family
import trl_trainer

NUM_EVAL_BATCHES = 4  # 16 prompts in batches of 8, each prompt twice


def build(tmp_path, kind="GRPO", **changes):
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, **changes}
    return trl_family.build(
        kind, tmp_path, eval_dataset=tiny.dataset(16), per_device_eval_batch_size=8, **arguments
    )


def watch(generator):
    """Per rollout: mode, prompts, and completions per prompt as TRL gives it."""
    generate, calls = generator.generate, []

    def watched(prompts, images, num_generations, profiler=None):
        mode = "train" if generator._trainer.model.training else "eval"
        calls.append((mode, prompts, num_generations))
        return generate(prompts, images, num_generations, profiler)

    generator.generate = watched
    return calls


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_metrics_of_an_evaluation_are_an_evaluations(tmp_path, kind):
    trainer = build(tmp_path, kind)
    trl_trainer.attach(trainer)
    trainer.train()
    log = trainer.state.log_history
    training = [entry for entry in log if "loss" in entry]
    evaluations = [entry for entry in log if "eval_loss" in entry]
    assert len(training) == len(evaluations) == 3
    names = {name for entry in training for name in entry if name.startswith("rollout/")}
    assert {"rollout/generated_tok_s", "rollout/sleep_ms"} <= names
    for entry in evaluations:
        assert {f"eval_{name}" for name in names} <= set(entry)
        assert not names & set(entry)
    assert not any(name.startswith("eval_") for entry in training for name in entry)


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}])
def test_each_batch_of_an_evaluation_is_generated_anew(tmp_path, changes):
    """Even if a training batch is kept for more iterations."""
    trainer = build(tmp_path, **changes)
    calls = watch(trl_trainer.attach(trainer))
    trainer.train()
    evaluations = [call for call in calls if call[0] == "eval"]
    assert len(evaluations) == 3 * NUM_EVAL_BATCHES
    for _, prompts, num_generations in evaluations:
        assert num_generations == 2
        assert prompts[::2] == prompts[1::2]
    for mode, prompts, num_generations in calls:
        if mode == "train":
            assert num_generations == 4
            assert prompts[::4] == prompts[1::4] == prompts[3::4]


def test_rollouts_leave_modes_and_buffers_alone(tmp_path):
    trainer = build(tmp_path, gradient_checkpointing=True)
    model = trainer.model
    model.model.layers[1].eval()  # a frozen part may be in another mode than the model
    model.model.register_buffer("counter", torch.arange(3.0))
    generator = trl_trainer.attach(trainer)

    def found():
        buffers = [(name, b.data_ptr(), b.tolist()) for name, b in model.named_buffers()]
        return [module.training for module in model.modules()], buffers

    for training in (True, False, True):
        model.train(training)
        model.model.layers[1].eval()
        before, buffered = found(), trainer._buffered_inputs
        trainer._generate(["xyz"] * 4)
        assert found() == before
        assert trainer._buffered_inputs is buffered
    assert generator.engine.policy_version == 3


def test_training_draws_the_same_completions_with_evaluations_between(tmp_path):
    def completions(**changes):
        trainer = build(tmp_path, **changes)
        generator = trl_trainer.attach(trainer)
        generate, drawn = generator.generate, []

        def watched(*args, **kwargs):
            result = generate(*args, **kwargs)
            if trainer.model.training:
                drawn.extend(result[1])
            return result

        generator.generate = watched
        trainer.train()
        return drawn

    assert completions() == completions(eval_steps=100)
