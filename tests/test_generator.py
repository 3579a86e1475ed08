"""A stock GRPOTrainer with the engine as its generator."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
import trl_trainer
from accelerate import Accelerator
from peft import LoraConfig
from transformers import TrainerCallback

from rollout import EngineClosed, RequestError, RolloutError, SamplingParams
from trainers import RolloutConfig, RolloutGenerator


def spy(trainer, generator):
    """Note each call's prompts, completions, version, and largest gap to the trainer's own scores.

    The scores come from a full forward of the trainer's model right after the rollout.
    """
    calls, generate = [], generator.generate

    def recording(prompts, *args, **kwargs):
        result = generate(prompts, *args, **kwargs)
        model = trainer.accelerator.unwrap_model(trainer.model)
        training, gaps = model.training, []
        model.eval()
        for prompt, ids, logprobs in zip(prompts, *result[1:3], strict=True):
            scores = tiny.logprobs(model, prompt, ids, trainer.temperature)
            gaps.append((torch.tensor(logprobs)[:, 0] - scores).abs().max().item())
        model.train(training)
        calls.append(
            SimpleNamespace(
                prompts=prompts,
                completions=result[1],
                gap=max(gaps),
                training=training,
                step=trainer.state.global_step,
                version=generator.engine.policy_version,
            )
        )
        return result

    generator.generate = recording
    return calls


def test_a_stock_trainer_learns_with_correction_and_metrics(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_steps=4)
    generator = trl_trainer.attach(trainer)
    calls = spy(trainer, generator)
    trainer.train()
    assert len(calls) == 4
    assert max(call.gap for call in calls) < 1e-5
    assert trl_trainer.logged(trainer, "rollout/policy_version") == [c.version for c in calls]
    assert len({call.version for call in calls}) == 4
    for name in ("rollout/generated_tok_s", "rollout/duration_s", "rollout/kv_pages_used"):
        assert all(value > 0 for value in trl_trainer.logged(trainer, name))
    assert all(1 <= value <= 5 for value in trl_trainer.logged(trainer, "rollout/rows_live"))
    # TRL computes its correction and these metrics only with `use_vllm`.
    ratios = trl_trainer.logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * 4, abs=1e-4)
    gaps = trl_trainer.logged(trainer, "sampling/sampling_logp_difference/mean")
    assert trl_trainer.logged(trainer, "rollout/logp_gap") == pytest.approx(gaps, abs=1e-9)
    assert all(0 < gap < 1e-5 for gap in gaps)


@pytest.mark.parametrize("door", ["attach", "rollout_func"])
def test_every_rollout_runs_on_the_weights_that_the_trainer_then_has(tmp_path, door):
    """Two train() calls, accumulation, several micro-steps per generation, eval between steps."""
    arguments = {
        "max_steps": 4,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "generation_batch_size": None,
    }
    if door == "attach":
        trainer = trl_trainer.build(tmp_path, **arguments)
        generator = trl_trainer.attach(trainer)
    else:
        generator = RolloutGenerator(trl_trainer.ENGINE)
        trainer = trl_trainer.build(tmp_path, rollout_func=generator, **arguments)
    trainer.eval_dataset = trainer.eval_dataset.select(range(4))  # two batches
    calls = spy(trainer, generator)
    trainer.train()
    trainer.args.max_steps = 6
    trainer.train()
    assert max(call.gap for call in calls) < 1e-5
    evals = [call for call in calls if not call.training]
    assert len(evals) >= 4
    assert len(trl_trainer.logged(trainer, "eval_reward")) >= 2
    assert len(trl_trainer.logged(trainer, "eval_rollout/generated_tok_s")) >= 2
    # A version never spans two optimizer steps.
    steps = {}
    for call in calls:
        steps.setdefault(call.version, set()).add(call.step)
    assert all(len(of_version) == 1 for of_version in steps.values())
    assert len(steps) > 8


def test_other_weights_for_an_evaluation_are_not_taken_into_the_next_rollout(tmp_path):
    """Averaged weights replace the trained ones during each evaluation, unseen by callbacks.

    Under bf16 autocast the engine keeps cast weights, so stale ones would change the numbers.
    """

    class Average(TrainerCallback):
        def on_step_end(self, args, state, control, model, **rest):
            self.kept = {name: p.detach().clone() for name, p in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)

        def on_evaluate(self, args, state, control, model, **rest):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(self.kept[name])

    arguments = {"bf16": True, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trl_trainer.build(tmp_path, callbacks=[Average()], **arguments)
    trl_trainer.attach(trainer)
    trainer.train()
    for name in ("rollout/logp_gap", "eval_rollout/logp_gap"):
        assert max(trl_trainer.logged(trainer, name)) < 0.05


def test_a_judge_that_wakes_the_engine_leaves_the_memory_to_training(tmp_path):
    asleep = []

    def judge(completion_ids, **columns):
        asked = [[9, 10, *ids[:3]] for ids in completion_ids]
        said = generator.engine.generate(asked, SamplingParams(max_new_tokens=2))
        return [float(each.token_ids[0] % 2) for each in said]

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            asleep.append(generator.engine.asleep)

    trainer = trl_trainer.build(tmp_path, callbacks=[Watch()])
    trainer.reward_funcs = [judge]
    generator = trl_trainer.attach(trainer)
    trainer.train()
    assert asleep == [True] * 3


@pytest.mark.parametrize("door", ["attach", "rollout_func"])
@pytest.mark.parametrize("kv_keep", ["rollout", "always"])
def test_the_memory_is_the_trainers_once_it_has_its_completions(tmp_path, door, kv_keep):
    config = replace(trl_trainer.ENGINE, kv_keep=kv_keep)
    generator, asleep = RolloutGenerator(config), []

    def reward(completion_ids, **columns):
        asleep.append(generator.engine.asleep)
        return trl_trainer.reward(completion_ids)

    extra = {"rollout_func": generator} if door == "rollout_func" else {}
    trainer = trl_trainer.build(tmp_path, bf16=True, **extra)
    trainer.reward_funcs = [reward]
    if door == "attach":
        generator.attach(trainer)
    trainer.train()
    assert asleep == [kv_keep == "rollout"] * 3
    assert all(size > 0 for size in trl_trainer.logged(trainer, "rollout/kv_mapped_gib"))
    assert trl_trainer.logged(trainer, "rollout/released_gib") == [0.0] * 3
    slept, woken = (trl_trainer.logged(trainer, f"rollout/{name}_ms") for name in ("sleep", "wake"))
    if kv_keep == "rollout":
        assert len(slept) == len(woken) == 3
        assert min(*slept, *woken) > 0
    else:
        assert slept == []
        assert woken[0] > 0


def test_turns_of_one_generation_share_a_version_and_its_pages(tmp_path):
    trainer = trl_trainer.build(tmp_path)
    generator = trl_trainer.attach(trainer)
    single_turn, shared = trainer._generate_single_turn, []

    def two_turns(prompt_ids, *rest):
        for _ in range(2):
            result = single_turn(prompt_ids, *rest)
            assert not generator.engine.asleep
            shared.append(generator.engine.stats.shared_tokens)
        return result

    trainer._generate_single_turn = two_turns
    trainer._generate(["xyzabcdef"])
    assert generator.engine.asleep
    assert shared == [0, 8]  # the prompt's two full pages
    assert len(trainer._metrics["train"]["rollout/sleep_ms"]) == 1
    assert generator.engine.policy_version == 1
    trainer._generate(["xyzabcdef"])
    assert generator.engine.policy_version == 2


def test_the_memory_plan_is_printed_once(tmp_path, capsys):
    trainer = trl_trainer.build(tmp_path)
    trl_trainer.attach(trainer)
    trainer.train()
    printed = capsys.readouterr().err
    assert printed.count("twinslot: memory on CPU") == 1
    for part in ("weights", "KV pages", "between rollouts"):
        assert part in printed


def test_completions_keep_their_eos_and_order_and_are_never_empty(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_steps=3, max_completion_length=30)
    calls = spy(trainer, trl_trainer.attach(trainer))
    trainer.train()
    ended = 0
    for call in calls:
        assert len(call.completions) == len(call.prompts) == 8
        for prompt, group in zip(call.prompts[::4], (0, 4), strict=True):
            assert call.prompts[group : group + 4] == [prompt] * 4
        for ids in call.completions:
            assert 1 <= len(ids) <= 30
            assert tiny.EOS not in ids[:-1]
            ended += ids[-1] == tiny.EOS
    assert ended


def test_no_module_of_the_trainer_runs_during_a_rollout(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_steps=2, bf16=False, gradient_checkpointing=True)
    ran = []

    def watch():
        for name, module in trainer.model.named_modules():
            module.register_forward_hook(lambda *_, name=name: ran.append(name))

    watch()
    generator = trl_trainer.attach(trainer)
    watch()
    generate, during = generator.generate, []

    def guarded(*args, **kwargs):
        before = len(ran)
        result = generate(*args, **kwargs)
        during.extend(ran[before:])
        return result

    generator.generate = guarded
    trainer.train()
    assert len(ran) > 100
    assert during == []


@pytest.mark.parametrize("fail", [False, True])
def test_the_trainer_and_the_random_states_are_left_as_found(tmp_path, fail):
    trainer = trl_trainer.build(tmp_path, gradient_checkpointing=True)
    generator = trl_trainer.attach(trainer)
    model = trainer.model

    def state():
        return (
            [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()],
            [(p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()],
            model.config._attn_implementation,
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
        )

    for training in (True, False):
        model.train(training)
        before = state()
        if fail:
            with pytest.raises(RequestError, match="empty prompt"):
                generator.generate([[9], []], None, 1)
        else:
            generator.generate([[9], [10, 11]], None, 1)
        assert state() == before


def test_seeds_differ_by_call_mode_rank_and_row_and_come_again_on_resume(tmp_path, monkeypatch):
    def completions(seed=42, step=0, calls=2, training=True):
        trainer = trl_trainer.build(tmp_path, seed=seed)
        generator = trl_trainer.attach(trainer)
        trainer.model.train(training)
        trainer.state.global_step = step
        return [generator.generate([[9, 10]] * 4, None, 4)[1] for _ in range(calls)]

    first, second = completions()
    assert completions() == [first, second]
    different = [first, second, *completions(step=1), *completions(seed=1)]
    different += completions(training=False)
    monkeypatch.setattr(Accelerator, "process_index", 1)
    different += completions()
    rows = [tuple(row) for call in different for row in call]
    assert len(set(rows)) == len(rows)


def test_length_is_clipped_to_what_a_row_can_hold(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_completion_length=30)
    config = RolloutConfig(max_rows=4, page_tokens=4, max_row_tokens=16)
    generator = trl_trainer.attach(trainer, config)
    trainer.eos_token_ids = []
    _, completions, _, _ = generator.generate([[9] * 4, [9] * 15], None, 1)
    assert [len(ids) for ids in completions] == [12, 1]
    with pytest.raises(RequestError, match=r"a prompt of 16 tokens .* max_row_tokens"):
        generator.generate([[9] * 16], None, 1)
    assert generator.llm.llm_engine.model_config.max_model_len == 16


def test_any_of_the_trainers_eos_ids_ends_a_row(tmp_path):
    model = tiny.build()
    model.generation_config.eos_token_id = [20, 21, 22, 23, 24, 25, 26, 27]
    trainer = trl_trainer.build(tmp_path, model=model, max_completion_length=60)
    generator = trl_trainer.attach(trainer)
    _, completions, _, _ = generator.generate([[9, 10]] * 16, None, 1)
    last = {ids[-1] for ids in completions if len(ids) < 60}
    assert len(last) > 2
    assert last <= set(trainer.eos_token_ids)


@pytest.mark.parametrize("kind", ["adapters that are not merged", "float32 under bf16 autocast"])
def test_rollouts_follow_weights_that_the_engine_combines_or_casts(tmp_path, kind):
    lora = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, task_type="CAUSAL_LM")
    is_cast = kind.startswith("float32")
    changes = {"bf16": True} if is_cast else {"peft_config": lora, "learning_rate": 0.1}
    trainer = trl_trainer.build(tmp_path, max_steps=4, **changes)
    generator = trl_trainer.attach(trainer)
    trainer.train()
    gaps = trl_trainer.logged(trainer, "rollout/logp_gap")
    assert len(gaps) == 4
    assert max(gaps) < (0.05 if is_cast else 1e-5)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert (generator.engine.stats.cast_bytes > 0) == is_cast


def test_a_failed_rollout_leaves_the_memory_and_training_can_go_on(tmp_path):
    trainer = trl_trainer.build(tmp_path, max_steps=2)
    engine, calls = trl_trainer.attach(trainer).engine, []
    step = engine.step

    def failing():
        calls.append(None)
        if len(calls) == 3:
            raise MemoryError("injected")
        return step()

    engine.step = failing
    with pytest.raises(MemoryError, match="injected"):
        trainer.train()
    assert engine.asleep
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_failing_rank_is_heard_of_and_one_that_can_tell_nobody_says_why(tmp_path, monkeypatch):
    def broken(tensor, reduction):
        raise RuntimeError("the device is gone")

    trainer = trl_trainer.build(tmp_path)
    generator, accelerator = trl_trainer.attach(trainer), trainer.accelerator
    monkeypatch.setattr(type(accelerator), "num_processes", 2)
    monkeypatch.setattr(accelerator, "reduce", lambda tensor, reduction: tensor + 1)
    with pytest.raises(RolloutError, match="failed on 1 other rank"):
        generator.generate([[9]], None, 1)
    monkeypatch.setattr(accelerator, "reduce", broken)
    with pytest.raises(RuntimeError, match="the device is gone"):
        generator.generate([[9]], None, 1)
    generator.engine.close()
    with pytest.raises(EngineClosed, match="the engine was closed"):
        generator.generate([[9]], None, 1)


def test_conversational_prompts_take_the_trainers_chat_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}z{% endif %}"
    )
    generator = RolloutGenerator(trl_trainer.ENGINE)
    trainer = trl_trainer.build(tmp_path)
    trainer.processing_class = trainer._tokenizer = tokenizer
    prompts = [[{"role": "user", "content": "xy"}]] * 2
    output = generator(prompts, trainer)
    assert output["prompt_ids"] == [tokenizer("xyz")["input_ids"]] * 2
    assert [len(row) for row in output["logprobs"]] == [len(r) for r in output["completion_ids"]]
