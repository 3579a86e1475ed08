"""Critics that share the policy's decoder: what they share, and that the policy is unchanged."""

import peft
import pytest
import test_critic
import test_ppo
import tiny
import torch
import trl_trainer
from accelerate import Accelerator
from safetensors.torch import load_file

from rollout import UnsupportedTrainer
from trainers.ppo.critic import Critic, CriticSettings
from trainers.ppo.value_model import VALUE_MODELS, PolicyHead, ValueModel

LORA = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
DROPS = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
SETTINGS = CriticSettings(learning_rate=1e-2)
each_kind = pytest.mark.parametrize("kind", ["adapter", "head"])


def adapted(config=LORA):
    return peft.get_peft_model(tiny.build(), config)


def size(parameters):
    return sum(p.numel() for p in parameters)


def own(model):
    return [p for p in model.parameters() if p.requires_grad]


def state(policy):
    """All state of a policy except the values of its tensors."""
    modules = [(name, type(m), m.training) for name, m in policy.named_modules()]
    parameters = [(name, id(p), p.requires_grad) for name, p in policy.named_parameters()]
    return modules, parameters, list(policy.peft_config), policy.active_adapters


@each_kind
def test_no_second_decoder_is_made(kind):
    """Only a head, and adapters if any, take new memory."""
    policy = adapted()
    before = {p.data_ptr() for p in policy.parameters()}
    model = VALUE_MODELS[kind](policy)
    new = [p for p in model.parameters() if p.data_ptr() not in before]
    adapters = [p for name, p in policy.named_parameters() if "lora_" in name]
    head = policy.config.hidden_size + 1
    assert size(new) == head + (size(adapters) if kind == "adapter" else 0)
    assert {id(p) for p in own(model)} == {id(p) for p in new}
    assert size(new) < size(policy.get_base_model().base_model.parameters()) / 5
    saved = Critic(model, SETTINGS, Accelerator(cpu=True)).state_dict()["model"]
    assert size(saved.values()) == size(new)


@each_kind
def test_the_policy_is_the_same_with_it(kind):
    policy = adapted(DROPS)
    policy.base_model.model.model.layers[1].eval()  # this layer is in another mode
    numbers, before = test_ppo.weights(policy), state(policy)
    critic = Critic(VALUE_MODELS[kind](policy), SETTINGS, Accelerator(cpu=True))
    given = test_critic.batch()
    for _ in range(2):
        critic.values(given.input_ids, given.attention_mask, given.mask.shape[1])
        critic.learn(given)
    assert state(policy) == before
    assert torch.equal(test_ppo.weights(policy), numbers)
    assert all(p.grad is None for p in policy.parameters())


def test_a_head_reads_what_the_policys_states_are_now():
    """Without dropout, whatever the policy's mode."""
    policy = adapted(DROPS).train()
    model = PolicyHead(policy)
    torch.nn.init.normal_(model.head.weight)
    ids = torch.arange(8, 16)[None]
    for _ in range(2):
        with torch.no_grad():
            values = model(ids, torch.ones_like(ids), 3)
            output = policy.eval()(ids, output_hidden_states=True)
            wanted = output.hidden_states[-1][:, -3:] @ model.head.weight[0]
        torch.testing.assert_close(values, wanted)
        policy.train()
        for parameter in policy.parameters():
            parameter.data *= 1.1


def test_weights_that_are_moved_are_still_shared():
    """`fuse_projections` and `.to(device)` move them."""
    policy = adapted()
    model = ValueModel.beside_adapters(policy)
    layer = policy.base_model.model.model.layers[0].mlp.up_proj.base_layer
    layer.weight.data = layer.weight.data.clone()
    mine = model.backbone.layers[0].mlp.up_proj.base_layer
    assert mine.weight.data_ptr() == layer.weight.data_ptr()


def test_adapters_that_were_trained_before_are_begun_from():
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    policy = adapted(config).eval()
    model = ValueModel.beside_adapters(policy).eval()
    ids = torch.arange(8, 16)[None]
    with torch.no_grad():
        states = model.backbone(ids).last_hidden_state
        wanted = policy(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(states, wanted)


@pytest.mark.parametrize("targets", [None, "lm_head"])
def test_an_adapter_needs_adapters_in_the_decoder(targets):
    policy = tiny.build() if targets is None else adapted(peft.LoraConfig(target_modules=[targets]))
    with pytest.raises(UnsupportedTrainer, match=r"not trained. Pass peft_config=Lora"):
        ValueModel.beside_adapters(policy)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_quantised_weights_are_shared_and_not_trained(storage):
    policy = adapted()
    weight = policy.get_base_model().base_model.layers[0].mlp.up_proj.base_layer.weight
    weight.data = weight.data.to(storage)
    weight.quant_state = ()  # as in bitsandbytes
    with pytest.raises(UnsupportedTrainer, match=r"1 weights are quantised, .*critic='adapter'"):
        ValueModel.from_policy(policy)
    critic = ValueModel.beside_adapters(policy).backbone
    assert critic.layers[0].mlp.up_proj.base_layer.weight is weight


def test_two_critics_are_refused(tmp_path):
    with pytest.raises(UnsupportedTrainer, match="critic='head' are two critics; drop one"):
        test_ppo.build(tmp_path, critic="head", value_model=test_ppo.Constant())


@each_kind
def test_values_come_to_explain_the_returns_of_a_policy_that_stands_still(kind):
    """Over half of their variance; a critic of zeros explains none."""
    settings = CriticSettings(learning_rate=3e-2, epochs=20)
    critic = Critic(VALUE_MODELS[kind](adapted()), settings, Accelerator(cpu=True))
    given = test_critic.batch()
    kept = given.mask.bool()

    def unexplained():
        values = critic.values(given.input_ids, given.attention_mask, kept.shape[1])[:, :-1]
        returns = given.returns[kept]
        return ((returns - values[kept]).var() / returns.var()).item()

    assert unexplained() == 1
    critic.learn(given)
    assert unexplained() < 0.5


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_a_critics_activations_are_checkpointed_where_the_policys_are(tmp_path, kind):
    """By default they are: only each layer's input is kept, and the layer runs again."""
    weights, calls = [], {True: 0, False: 0}
    for checkpointing in (True, False):
        changes = {"gradient_checkpointing": checkpointing, "peft_config": LORA}
        torch.manual_seed(0)
        critic = test_ppo.build(tmp_path, critic=kind, **changes).critic

        def count(*_, checkpointing=checkpointing):
            calls[checkpointing] += 1

        critic.model.backbone.layers[0].mlp.register_forward_pre_hook(count)
        critic.learn(test_critic.batch())
        critic.learn(test_critic.batch())
        weights.append(torch.cat([p.detach().flatten() for p in own(critic.model)]))
    assert calls == {True: 4, False: 2}
    assert torch.equal(*weights)


@each_kind
def test_it_learns_saves_and_resumes_beside_an_adapted_policy(tmp_path, kind):
    arguments = {
        "critic": kind,
        "peft_config": LORA,
        "kl_coef": 0.1,
        "save_strategy": "steps",
        "save_steps": 2,
        "max_steps": 4,
        "value_lr_scheduler_type": "linear",
    }
    whole = test_ppo.build(tmp_path / "whole", **arguments)
    untouched = state(whole.model)[1:]
    whole.train()
    assert state(whole.model)[1:] == untouched
    assert whole.vllm_generation.engine.worker.twin.num_builds == 1
    assert max(trl_trainer.logged(whole, "rollout/logp_gap_max")) < 1e-4
    trained = {id(p) for group in whole.optimizer.param_groups for p in group["params"]}
    assert not trained & {id(p) for p in own(whole.critic.model)}
    # At the first rollout the reference equals the policy. Its adapters are off, so it must differ.
    first, *later = trl_trainer.logged(whole, "kl")
    assert abs(first) < 1e-5 < min(map(abs, later))

    checkpoint = tmp_path / "whole/checkpoint-2"
    assert not [path for path in checkpoint.iterdir() if path.is_dir()]
    names = load_file(checkpoint / "adapter_model.safetensors")
    wanted = {n.replace(".default", "") for n, p in whole.model.named_parameters() if "lora_" in n}
    assert set(names) == wanted

    resumed = test_ppo.build(tmp_path / "resumed", **arguments)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(test_ppo.weights(resumed.model), test_ppo.weights(whole.model))
    for mine, other in zip(own(resumed.critic.model), own(whole.critic.model), strict=True):
        assert torch.equal(mine, other)
    assert trl_trainer.logged(resumed, "value/lr") == pytest.approx([0.05, 0.0375, 0.025, 0.0125])
    assert all(each.any() for each in own(whole.critic.model))
