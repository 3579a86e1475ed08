"""PPO with tools and environments, whose tokens lie between the policy's."""

import pytest
import test_ppo
import test_tools
import tiny
import torch
from datasets import Dataset
from test_tools import calls  # noqa: F401 - a fixture

GAMMA = 0.5
KINDS = {
    "tools": (("multiply", ("a", "b")), {"tools": [test_tools.multiply]}),
    "environment": (("add", ("number",)), {"environment_factory": test_tools.Counter}),
}


def build(tmp_path, **changes):
    """A trainer with conversations of short turns and a critic of zeros."""
    tokenizer, model = tiny.tokenizer(), tiny.build()
    tokenizer.chat_template = test_tools.TEMPLATE
    tokenizer.response_template = "set, and never read"
    model.generation_config.eos_token_id = list(range(7, 37))
    prompts = ["abcdefgh" + "xyz"[: i % 3] for i in range(16)]
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return test_ppo.build(
        tmp_path,
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        value_model=test_ppo.Constant(),
        value_learning_rate=0.0,
        whiten_advantages=False,
        gamma=GAMMA,
        max_steps=1,
        max_completion_length=60,
        max_tool_calling_iterations=test_tools.TURNS,
        **changes,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_passes_over_what_the_policy_did_not_write(tmp_path, calls, kind):  # noqa: F811
    """gamma 0.5 halves it per policy token; tool tokens do not discount it."""
    (name, arguments), changes = KINDS[kind]
    calls.update(name=name, arguments=arguments)
    trainer = build(tmp_path, **changes)
    turns = test_tools.watch(trainer.vllm_generation)
    rollouts, learnt = test_ppo.rollouts_of(trainer), []
    learn = trainer.critic.learn
    trainer.critic.learn = lambda batch: learnt.append(batch) or learn(batch)
    trainer.train()
    assert len(turns) == 1 + test_tools.TURNS
    (scored,), (batch,) = rollouts, learnt
    assert trainer._rewards.abs().min() > 0  # the environment has a column of its own
    rewards = trainer._rewards.sum(1)
    own = scored["completion_mask"] * scored["tool_mask"]
    assert (scored["completion_mask"] > own).any(1).all()  # each row has tokens of a tool
    assert torch.equal(batch.mask, own)
    still_to_come = own.flip(1).cumsum(1).flip(1) - own
    wanted = rewards[:, None] * GAMMA**still_to_come * own
    torch.testing.assert_close(scored["advantages"], wanted)
    torch.testing.assert_close(batch.returns, wanted)
