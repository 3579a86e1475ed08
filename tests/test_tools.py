"""TRL's tool loop and environments on the engine: each turn reuses the pages of the last."""

from itertools import pairwise

import pytest
import tiny
import trl_trainer
from datasets import Dataset
from trl.trainer import grpo_trainer

from rollout import UnsupportedTrainer
from trainers import RolloutGenerator

TURNS = 3
TEMPLATE = """
{%- for message in messages %}{{ message['content'] }}
{%- for call in message.get('tool_calls') or [] %}
{{- call.function.name }}{{ call.function.arguments }}
{%- endfor %}{% endfor %}{% if add_generation_prompt %}z{% endif -%}
"""


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other.

    Returns:
        Their product.
    """
    return a * b


class Counter:
    """An environment: the model adds to a sum, which is its reward."""

    def reset(self, **example) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        """Add to the sum.

        Args:
            number: How much.

        Returns:
            The sum.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return self.total / 100


@pytest.fixture
def calls(monkeypatch):
    """Every completion calls a tool, whose name and arguments a test sets here.

    A random model follows no syntax. The numbers in the arguments come from its completion.
    """
    wanted = {}

    def parse(tokenizer, ids, **_):
        arguments = dict(zip(wanted["arguments"], ids * 2, strict=False))
        function = {"name": wanted["name"], "arguments": arguments}
        call = {"type": "function", "function": function}
        return {"role": "assistant", "content": tokenizer.decode(ids), "tool_calls": [call]}

    monkeypatch.setattr(grpo_trainer, "parse_response", parse)
    return wanted


def build(tmp_path, **changes):
    """A trainer with conversations, whose model ends its turns soon."""
    tokenizer, model = tiny.tokenizer(), tiny.build()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = "set, and never read"
    model.generation_config.eos_token_id = list(range(7, 37))
    rows = [
        {"prompt": [{"role": "user", "content": "abcdefgh" + "xyz"[: i % 3]}]} for i in range(16)
    ]
    limits = {"max_completion_length": 60, "max_tool_calling_iterations": TURNS, "max_steps": 2}
    return trl_trainer.build(
        tmp_path,
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        **{**limits, **changes},
    )


def watch(generator):
    """Record prompts, completions, hit rate and version of each turn."""
    generate, turns = generator.generate, []

    def watched(prompts, *args, **kwargs):
        result = generate(prompts, *args, **kwargs)
        stats = generator.engine.stats
        turns.append((list(prompts), list(result[1]), stats.prefix_hit_rate, stats.policy_version))
        return result

    generator.generate = watched
    return turns


def test_a_calculator_is_called_over_several_turns_that_reuse_their_pages(tmp_path, calls):
    calls.update(name="multiply", arguments=("a", "b"))
    trainer = build(tmp_path, tools=[multiply])
    turns = watch(trl_trainer.attach(trainer))
    trainer.train()
    assert len(turns) == 2 * (1 + TURNS)
    assert len({version for *_, version in turns}) == 2
    for step in (turns[: 1 + TURNS], turns[1 + TURNS :]):
        for (prompts, completions, *_), (later, _, hit_rate, _) in pairwise(step):
            assert hit_rate > 0.5
            beginnings = [tuple(p + c) for p, c in zip(prompts, completions, strict=True)]
            for prompt in later:
                assert any(tuple(prompt[: len(begin)]) == begin for begin in beginnings)
    assert min(trl_trainer.logged(trainer, "rollout/prefix_hit_rate")) > 0.5
    assert trl_trainer.logged(trainer, "tools/failure_frequency") == [0.0] * 2
    assert min(trl_trainer.logged(trainer, "tools/call_frequency")) > 1


def test_the_results_of_tools_are_not_scored(tmp_path, calls):
    """Tool output has no log-probability; the policy's tokens are as close as without tools."""
    calls.update(name="multiply", arguments=("a", "b"))
    trainer = build(tmp_path, tools=[multiply])
    trl_trainer.attach(trainer)
    trainer.train()
    for name in ("rollout/logp_gap_max", "sampling/sampling_logp_difference/max"):
        assert max(trl_trainer.logged(trainer, name)) < 1e-4


def test_environments_run_on_the_engine(tmp_path, calls):
    calls.update(name="add", arguments=("number",))
    trainer = build(tmp_path, environment_factory=Counter)
    turns = watch(trl_trainer.attach(trainer))
    trainer.train()
    assert len(turns) == 2 * (1 + TURNS)
    assert all(hit_rate > 0.5 for *_, hit_rate, _ in (turns[1], turns[-1]))
    assert min(trl_trainer.logged(trainer, "rewards/Counter/mean")) > 0
    assert trl_trainer.logged(trainer, "tools/failure_frequency") == [0.0] * 2


@pytest.mark.parametrize("kind", [{"tools": [multiply]}, {"environment_factory": Counter}])
def test_a_rollout_func_refuses_tools_before_one_is_called(tmp_path, kind):
    """Otherwise TRL raises a TypeError when the model first calls a tool, maybe hours later."""
    trainer = build(tmp_path, rollout_func=RolloutGenerator(trl_trainer.ENGINE), **kind)
    with pytest.raises(UnsupportedTrainer, match="drop rollout_func, and attach this generator"):
        trainer.train()


def test_a_tool_result_beyond_what_a_row_can_hold_ends_the_row(tmp_path, calls):
    """TRL asks the generator for the longest row and leaves the tool's result out."""
    calls.update(name="multiply", arguments=("a", "b"))
    trainer = build(tmp_path, tools=[multiply])
    generator = trl_trainer.attach(
        trainer, trl_trainer.RolloutConfig(max_rows=5, max_row_tokens=20)
    )
    turns = watch(generator)
    trainer.train()
    assert all(len(prompt) < 20 for prompts, *_ in turns for prompt in prompts)
    assert trl_trainer.logged(trainer, "rollout/logp_gap_max")[-1] < 1e-4
