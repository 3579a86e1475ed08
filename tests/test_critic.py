"""What the critic reads, what it learns from, and how it resumes."""

import copy

import peft
import pytest
import tiny
import torch
from accelerate import Accelerator

from rollout import UnsupportedTrainer
from trainers.ppo.critic import Critic, CriticSettings, ValueBatch, value_losses
from trainers.ppo.value_model import ValueModel

PROMPT, TOKENS, ROWS = 4, 5, 6
SETTINGS = CriticSettings(learning_rate=1e-3, micro_batch_rows=4)


def build(policy=None, settings=SETTINGS):
    model = ValueModel.from_policy(policy or tiny.build())
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)  # a zero head would hide what the critic reads
    return Critic(model, settings, Accelerator(cpu=True))


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, tiny.VOCAB, (ROWS, PROMPT + TOKENS), generator=generator)
    attention = torch.ones_like(ids)
    attention[1, :2], attention[2, -2:] = 0, 0  # left and right padding
    mask = attention[:, PROMPT:].clone()
    mask[3, 1:3], mask[4] = 0, 0  # tool output, and a row without trainable tokens
    values, returns = torch.randn(2, ROWS, TOKENS, generator=generator)
    return ValueBatch(ids, attention, mask, values, returns)


def parameters(critic):
    return torch.cat([p.detach().flatten() for p in critic.model.parameters()])


def values(critic, ids, attention=None):
    return critic.values(ids, torch.ones_like(ids) if attention is None else attention, TOKENS)


def test_a_new_critic_says_zero_and_has_the_policys_backbone_not_its_memory():
    policy = tiny.build()
    model = ValueModel.from_policy(policy)
    critic = Critic(model, SETTINGS, Accelerator(cpu=True))
    assert not values(critic, batch().input_ids).any()
    own = dict(model.backbone.named_parameters())
    for name, weight in policy.base_model.named_parameters():
        assert torch.equal(own[name], weight)
        assert own[name].data_ptr() != weight.data_ptr()


def test_adapters_are_left_out_and_every_weight_learns():
    policy = tiny.build()
    wanted = set(dict(policy.base_model.named_parameters()))
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(policy, lora)
    backbone = ValueModel.from_policy(adapted).backbone
    assert set(dict(backbone.named_parameters())) == wanted
    assert all(weight.requires_grad for weight in backbone.parameters())
    assert any("lora" in name for name, _ in adapted.named_parameters())


def test_a_value_has_read_all_tokens_before_its_own_and_no_later_one():
    """Column t is the value before token t. Catches the fault `value reading the action`."""
    critic, ids = build(), batch().input_ids
    before = values(critic, ids)
    for token in range(TOKENS):
        changed = ids.clone()
        changed[:, PROMPT + token] = (changed[:, PROMPT + token] - 7) % (tiny.VOCAB - 8) + 8
        after = values(critic, changed)
        torch.testing.assert_close(after[:, : token + 1], before[:, : token + 1])
        assert not torch.isclose(after[:, token + 1], before[:, token + 1]).any()


def test_padding_and_company_change_no_value():
    critic, ids = build(), batch().input_ids
    wanted = values(critic, ids)
    wide = torch.nn.functional.pad(ids, (3, 2), value=0)
    attention = torch.nn.functional.pad(torch.ones_like(ids), (3, 2))
    padded = critic.values(wide, attention, TOKENS + 2)[:, : TOKENS + 1]
    torch.testing.assert_close(padded, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values(critic, ids[2:3]), wanted[2:3], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("clip", "wanted", "clipped"), [(0.2, 0.845, True), (None, 0.5, False), (0.6, 0.5, False)]
)
def test_losses_worked_out_by_hand(clip, wanted, clipped):
    """V = 1, V_old = 0.5, R = 2."""
    losses, decided = value_losses(*map(torch.tensor, ([1.0], [0.5], [2.0])), clip)
    torch.testing.assert_close(losses, torch.tensor([wanted]))
    assert decided.tolist() == [clipped]


def test_micro_batches_of_any_size_make_the_same_update():
    updates = []
    for rows in (1, 4, ROWS):
        torch.manual_seed(0)
        critic = build(settings=CriticSettings(learning_rate=1e-3, micro_batch_rows=rows))
        logged = critic.learn(batch())
        updates.append((parameters(critic), logged))
    for weights, logged in updates[1:]:
        torch.testing.assert_close(weights, updates[0][0], atol=1e-5, rtol=1e-5)
        assert logged == pytest.approx(updates[0][1], rel=1e-4)


def test_the_loss_is_the_mean_over_all_trainable_tokens():
    critic, given = build(), batch()
    said = values(critic, given.input_ids, given.attention_mask)[:, :-1]
    errors = (said - given.returns)[given.mask.bool()]
    assert critic.learn(given)["value/loss"] == pytest.approx(errors.square().mean().item() / 2)


def test_what_is_masked_teaches_nothing():
    given, weights = batch(), []
    for wrong in (0.0, 1e6):
        torch.manual_seed(0)
        critic = build()
        critic.learn(given._replace(returns=given.returns + wrong * (given.mask == 0)))
        weights.append(parameters(critic))
    assert torch.equal(*weights)


def test_a_rollout_without_a_trainable_token_changes_nothing():
    critic, given = build(), batch()
    critic.learn(given)
    before = parameters(critic)
    logged = critic.learn(given._replace(mask=torch.zeros_like(given.mask)))
    assert logged["value/loss"] == 0
    assert torch.equal(parameters(critic), before)


def test_epochs_and_mini_batches_bring_the_values_to_the_returns():
    settings = CriticSettings(
        learning_rate=3e-3, epochs=20, mini_batches=2, micro_batch_rows=3, clip=50.0
    )
    critic, given = build(settings=settings), batch()
    first = critic.learn(given)
    last = critic.learn(given)
    assert last["value/loss"] < first["value/loss"] / 2
    assert last["value/clip_ratio"] == 0


def test_gradients_are_clipped():
    norms = []
    for limit in (1e9, 1e-3):
        settings = CriticSettings(learning_rate=1e-3, max_grad_norm=limit)
        critic = build(settings=settings)
        steps = []
        critic.optimizer.register_step_pre_hook(
            lambda optimizer, *_, steps=steps: steps.append(
                torch.nn.utils.get_total_norm(
                    [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
                ).item()
            )
        )
        logged = critic.learn(batch())["value/grad_norm"]
        norms.append((logged, *steps))
    assert norms[0][0] == pytest.approx(norms[0][1])
    assert norms[1] == (pytest.approx(norms[0][0]), pytest.approx(1e-3, rel=1e-2))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 0.853553, 0.5, 0.146447]),
    ],
)
def test_the_learning_rate_goes_on_from_rollout_to_rollout(kind, wanted):
    """It changes once per rollout, not per update."""
    settings = CriticSettings(learning_rate=1e-3, lr_scheduler_type=kind, epochs=2)
    critic, schedules = build(settings=settings), []
    for _ in range(2):  # a second training restarts it
        critic.schedule(len(wanted))
        schedules.append([critic.learn(batch())["value/lr"] for _ in wanted])
    for rates in schedules:
        assert rates == pytest.approx([1e-3 * share for share in wanted], rel=1e-5)


def test_a_saved_critic_goes_on_to_the_last_bit(tmp_path):
    settings = CriticSettings(learning_rate=1e-3, lr_scheduler_type="linear")
    critic = build(settings=settings)
    critic.schedule(3)
    critic.learn(batch())
    torch.save(critic.state_dict(), tmp_path / "critic.pt")
    other = build(copy.deepcopy(tiny.build(seed=5)), settings)
    other.schedule(3)
    other.load_state_dict(torch.load(tmp_path / "critic.pt", weights_only=True))
    for each in (critic, other):
        torch.manual_seed(3)
        assert each.learn(batch(seed=1))["value/lr"] == pytest.approx(2e-3 / 3)
    assert torch.equal(parameters(critic), parameters(other))


def test_another_critics_checkpoint_is_refused():
    critic, state = build(), build().state_dict()
    state["model"]["head.scale"] = state["model"].pop("head.bias")
    with pytest.raises(UnsupportedTrainer, match=r"2 weights are .* such as head\.bias; resume"):
        critic.load_state_dict(state)


@pytest.mark.parametrize(
    ("dtype", "rate", "is_lost"),
    [(torch.bfloat16, 5e-6, True), (torch.bfloat16, 1e-4, False), (torch.float32, 5e-6, False)],
)
def test_steps_that_rounding_loses_are_warned_of(caplog, dtype, rate, is_lost):
    critic = build(tiny.build().to(dtype), CriticSettings(learning_rate=rate))
    num_weights = sum(p.numel() for p in critic.model.backbone.parameters())
    assert (f"{num_weights:,} weights in bfloat16" in caplog.text) == is_lost
    assert bool(caplog.text) == is_lost


@pytest.mark.parametrize(
    ("rate", "least", "most"), [(1e-6, 0, 0.02), (1e-5, 0.02, 0.2), (1e-4, 0.5, 1)]
)
def test_how_much_of_adams_way_bfloat16_keeps(rate, least, most):
    """100 steps of a fixed direction plus noise; the float32 sum moves about half their length."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter((torch.randn(20_000) * 0.02).bfloat16())
    before, wide = weights.detach().clone(), torch.nn.Parameter(weights.detach().float())
    optimizers = [torch.optim.AdamW([p], lr=rate, weight_decay=0) for p in (weights, wide)]
    for _ in range(100):
        gradient = torch.randn(20_000) + 0.5
        weights.grad, wide.grad = gradient.bfloat16(), gradient
        for optimizer in optimizers:
            optimizer.step()
    kept = ((weights - before).float().mean() / (wide - before.float()).mean()).item()
    assert least <= kept <= most
