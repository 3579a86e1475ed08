"""The behaviour of TRL and transformers that `trainers/` and `rollout/` rely on.

If a test fails on a new version, check the code before that version is allowed. No test attaches an
engine, because the engine refuses unknown versions of TRL.
"""

import ast
import copy
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import tiny
import torch
import trl_family
import trl_trainer
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AttentionInterface, get_scheduler
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from rollout.model.attention import _HARMLESS
from trainers.adapter.seams import SEAMS

SEAM = ("prompts", "images", "num_generations", "profiler")
SCORED = "old_per_token_logps sampling_per_token_logps importance_sampling_ratio tool_mask"
each_kind = pytest.mark.parametrize("kind", tuple(trl_family.HOMES))
each_family = pytest.mark.parametrize("family", tiny.FAMILIES)


class Stub:
    """A generator as a trainer sees it: two tokens per row; records its calls."""

    llm = None

    def __init__(self):
        self.synced, self.calls = 0, []

    def sync_weights(self):
        self.synced += 1

    def generate(self, **arguments):
        self.calls.append(arguments)
        ids = [[9, tiny.EOS] for _ in arguments["prompts"]]
        logprobs = [[[-3.0], [-3.0]] for _ in ids]
        return arguments["prompts"], ids, logprobs, [[[token] for token in row] for row in ids]


# --- TRL


def test_the_generator_is_called_by_these_names():
    assert tuple(inspect.signature(VLLMGeneration.generate).parameters)[1:] == SEAM


def for_vllm(test: ast.expr) -> bool:
    return ast.unparse(test) in ("self.use_vllm", "args.use_vllm")


def sets_for_vllm(source: str) -> dict[str, str]:
    """Attribute -> expression that a constructor sets only with vLLM."""
    assigned: dict[str, str] = {}

    def note(statements):
        for node in statements:
            for child in ast.walk(node):
                if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Attribute):
                    assigned[child.targets[0].attr] = ast.unparse(child.value)

    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.If) and for_vllm(node.test):
            note(node.body)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            note([node] if for_vllm(node.value.test) else [])
    return assigned


@each_kind
def test_the_table_says_what_the_constructor_sets(kind):
    """Names and values from the source of the installed TRL."""
    assigned = sets_for_vllm(inspect.getsource(trl_family.trainer_class(kind).__init__))
    assert assigned.pop("vllm_generation").startswith("VLLMGeneration(")
    args = SimpleNamespace(vllm_sync_frequency=3)
    trainer = SimpleNamespace(use_vllm=True, vllm_sync_frequency=3)
    values = {name: eval(text, {"args": args, "self": trainer}) for name, text in assigned.items()}
    assert values == SEAMS[f"{kind}Trainer"].sets(args)


@each_kind
def test_a_trainer_generates_through_what_the_table_names(kind, tmp_path):
    """One step with a stub generator, attached through the table alone."""
    trainer, stub, seen = trl_family.build(kind, tmp_path, max_steps=1), Stub(), []
    seam = SEAMS[f"{kind}Trainer"]
    wanted = {**seam.sets(trainer.args), "vllm_generation": stub, "use_vllm": True}
    for name, value in wanted.items():
        setattr(trainer, name, value)
    method = getattr(trainer, seam.generates)

    def watched(*batch):
        seen.append(len(stub.calls))
        result = method(*batch)
        seen.append(len(stub.calls))
        return result

    setattr(trainer, seam.generates, watched)
    trainer.train()
    assert seen == [0, 1]
    assert stub.synced == 1
    (call,) = stub.calls
    assert {"prompts", "images", "num_generations"} <= set(call) <= set(SEAM)
    assert call["images"] is None
    assert len(call["prompts"]) == 8
    assert all(isinstance(token, int) for prompt in call["prompts"] for token in prompt)


@each_kind
def test_metrics_are_averaged_and_those_of_an_evaluation_are_prefixed(kind, tmp_path):
    trainer = trl_family.build(kind, tmp_path)
    for mode, name in (("train", "rollout/x"), ("eval", "eval_rollout/x")):
        trainer._metrics[mode]["rollout/x"] += [1.0, 3.0]
        trainer.model.train(mode == "train")
        trainer.log({"loss": 0.0} if mode == "train" else {"eval_loss": 0.0})
        assert trainer.state.log_history[-1][name] == 2.0
        assert not trainer._metrics[mode]


@pytest.mark.parametrize(
    ("method", "texts"),
    [
        ("_tool_call_loop", ["self.vllm_generation.llm.llm_engine.model_config.max_model_len"]),
        (
            "_generate_and_score_completions",
            [
                *(f'output["{name}"]' for name in SCORED.split()),
                # The raw ratio's sign and mask, and the modes that sum over a sequence.
                "(old_per_token_logps - sampling_per_token_logps) * mask",
                'in ["sequence_mask", "sequence_truncate"]',
                "per_token_logps_diff.sum(dim=-1, keepdim=True)",
                "torch.exp(logps_diff)",
            ],
        ),
    ],
)
def test_grpo_computes_what_we_compute_as_well(method, texts):
    source = inspect.getsource(getattr(GRPOTrainer, method))
    assert [text for text in texts if text not in source] == []


def test_log_probabilities_are_at_temperature_over_the_full_vocabulary(tmp_path):
    trainer = trl_family.build("GRPO", tmp_path, temperature=0.7)
    prompt, completion = [9, 10, 11], [12, 13]
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logps, *_ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.ones_like(ids), len(completion), 1
        )
    wanted = tiny.logprobs(trainer.model, prompt, completion, temperature=0.7)
    assert logps[0].tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


# --- transformers


def run_with(family, *, mask=None):
    """The keyword arguments that a family passes to a registered attention function."""
    calls, name = [], "for_this_test"

    def attend(module, query, key, value, attention_mask, **options):
        calls.append((attention_mask, options))
        return torch.zeros_like(query).transpose(1, 2), None

    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    model, ids = tiny.build(family), torch.arange(8, 14)[None]
    model.set_attn_implementation(name)
    try:
        model(ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)
    return calls


@each_family
def test_attention_is_given_nothing_that_paged_attention_does_not_know(family):
    known = _HARMLESS | {"scaling", "sliding_window", "softcap", "s_aux"}
    calls = run_with(family)
    assert len(calls) == 3
    for _, options in calls:
        given = {name for name, value in options.items() if value is not None}
        assert {name for name in given if not name.startswith("output_")} <= known


def test_a_mask_function_is_asked_by_the_attentions_name_and_without_one_there_is_no_mask():
    import rollout.exact.attention  # noqa: F401

    assert {"twinslot_paged", "twinslot_exact"} <= set(ALL_ATTENTION_FUNCTIONS.keys())
    assert [mask for mask, _ in run_with("qwen3")] == [None] * 3
    calls = run_with("qwen3", mask=lambda *_, attention_mask=None, **others: attention_mask)
    assert [mask.shape for mask, _ in calls] == [(1, 6)] * 3


@each_family
def test_what_the_engine_asks_of_a_model_is_there(family):
    model = tiny.build(family)
    assert model._supports_attention_backend
    assert model.config.get_text_config() is model.config
    assert not model.config.is_encoder_decoder
    names = inspect.signature(type(model).forward).parameters
    assert {"logits_to_keep", "position_ids", "use_cache"} <= set(names)


@each_family
def test_logits_are_computed_at_the_positions_that_are_asked_for(family):
    model = tiny.build(family).eval()
    ids, kept = torch.arange(8, 16)[None], torch.tensor([1, 6])
    with torch.no_grad():
        every, some = model(ids).logits, model(ids, logits_to_keep=kept).logits
    assert torch.allclose(some, every[:, kept], atol=1e-5)


# --- PPO


PPO_WRAPS = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "create_scheduler": ("num_training_steps", "optimizer"),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
}
PPO_CALLS = {
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): (
        "model input_ids attention_mask logits_to_keep batch_size"
    ),
    (GRPOTrainer, "_get_output_dir"): "trial",
    (Accelerator, "prepare_model"): "model",
    (Accelerator, "unwrap_model"): "model",
    (Accelerator, "reduce"): "tensor reduction",
    (Accelerator, "gather"): "tensor",
    (PeftModel, "get_base_model"): "",
}


@pytest.mark.parametrize("name", PPO_WRAPS)
def test_ppo_wraps_methods_of_these_signatures(name):
    parameters = tuple(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert parameters == ("self", *PPO_WRAPS[name])


@pytest.mark.parametrize(("owner", "name"), PPO_CALLS, ids=str)
def test_ppo_calls_methods_that_have_these_parameters(owner, name):
    parameters = list(inspect.signature(getattr(owner, name)).parameters)[1:]
    wanted = PPO_CALLS[owner, name].split()
    assert parameters[: len(wanted)] == wanted


def one_of_each(tmp_path, checkpoint=None, **changes):
    """A stock trainer after some steps: results and order of the methods that PPO wraps."""
    trainer, results, order = trl_family.build("GRPO", tmp_path, **changes), {}, []

    def watch(name):
        method = getattr(trainer, name)

        def watched(*args, **kwargs):
            order.append(name)
            results[name] = method(*args, **kwargs)
            return results[name]

        setattr(trainer, name, watched)

    for name in (*PPO_WRAPS, "_prepare_inputs"):
        watch(name)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, results, order


def test_ppo_finds_in_a_rollout_and_on_the_trainer_what_it_reads(tmp_path):
    changes = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer, results, order = one_of_each(tmp_path, **changes)
    scored, rewards = results["_generate_and_score_completions"], results["_calculate_rewards"]
    for side in ("prompt", "completion"):
        ids, mask = scored[f"{side}_ids"], scored[f"{side}_mask"]
        assert ids.shape == mask.shape
        assert ids.dtype == mask.dtype == torch.int64
    assert rewards.shape == (8, 1)
    assert trainer.reward_weights.tolist() == [1.0]
    assert scored["advantages"].shape == (8,)
    assert len(trainer._logs["advantages"]) == 8
    assert trainer._is_vlm is False
    assert (trainer.beta, trainer.num_iterations) == (0.0, 1)
    assert tiny.EOS in trainer.eos_token_ids
    assert trainer._tokenizer.pad_token_id == 0
    assert trl_trainer.logged(trainer, "frac_reward_zero_std")
    assert trainer.accelerator.distributed_type == DistributedType.NO
    assert trainer.accelerator.mixed_precision == "no"
    folder = trainer._get_output_dir(trial=None)
    assert (tmp_path / f"{PREFIX_CHECKPOINT_DIR}-1").samefile(f"{folder}/checkpoint-1")
    step = "_prepare_inputs _generate_and_score_completions _calculate_rewards _compute_loss"
    assert order == ["create_scheduler", *step.split(), "_save_checkpoint"]
    # The schedule exists before its state is loaded.
    *_, order = one_of_each(tmp_path, f"{folder}/checkpoint-1", max_steps=2)
    assert order == ["create_scheduler", "_load_optimizer_and_scheduler", *step.split()]


def test_a_reward_that_nobody_gives_is_not_a_number(tmp_path):
    trainer = trl_family.build("GRPO", tmp_path)
    trainer.reward_funcs = [lambda **_: [None, 1.0]]
    rewards = trainer._calculate_rewards([{}, {}], ["a", "b"], ["c", "d"], [[9], [9]])
    assert rewards.isnan().tolist() == [[True], [False]]


def test_a_rollout_serves_as_many_pieces_as_ppos_schedule_counts(tmp_path):
    """`steps_per_generation * num_iterations` micro-batches; two are a step here."""
    _, _, order = one_of_each(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=5,
    )
    assert order.count("_compute_loss") == 5 * 2
    assert order.count("_generate_and_score_completions") == 2
    pieces = [name for name in order if name in ("_prepare_inputs", "_calculate_rewards")]
    assert [i for i, name in enumerate(pieces) if name == "_calculate_rewards"] == [1, 10]


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"])
def test_the_policys_loss_takes_an_advantage_a_token(tmp_path, loss_type):
    """(B, T) advantages work; equal ones per row give the loss of (B,) advantages."""
    trainer = trl_family.build("GRPO", tmp_path, loss_type=loss_type)
    scored = rollout(trainer)

    def loss_and_gradient(advantages):
        loss = trainer._compute_loss(trainer.model, {**scored, "advantages": advantages})
        trainer.model.zero_grad()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        return loss.detach(), gradient

    wanted = loss_and_gradient(scored["advantages"])
    by_token = scored["advantages"][:, None].repeat(1, 9)
    early = torch.arange(9) < 3
    parts = loss_and_gradient(by_token * early), loss_and_gradient(by_token * ~early)
    assert wanted[1].abs().max() > 1e-4
    for actual in (loss_and_gradient(by_token), [sum(both) for both in zip(*parts, strict=True)]):
        torch.testing.assert_close(actual[0], wanted[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(actual[1], wanted[1], atol=1e-6, rtol=1e-4)


def rollout(trainer):
    """Eight made-up rows of three or nine tokens, with different advantages."""
    generator = torch.Generator().manual_seed(0)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    ids = torch.randint(8, tiny.VOCAB, (8, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 7:] = 0
    return {
        "prompt_ids": ids[:, :3],
        "prompt_mask": mask[:, :3],
        "completion_ids": ids[:, 3:],
        "completion_mask": mask[:, 3:],
        "advantages": torch.linspace(-2, 2, 8),
        "num_items_in_batch": mask[:, 3:].sum(),
    }


def test_one_completion_a_prompt_is_refused_by_the_config_alone(tmp_path):
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(output_dir=str(tmp_path), num_generations=1, use_cpu=True, bf16=False)


@each_family
def test_a_decoder_gives_its_last_states_to_a_critic(family):
    """`base_model` is the model without its head; PEFT's `get_base_model` is the wrapped model."""
    model = tiny.build(family).eval()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    decoder = adapted.get_base_model().base_model
    assert not any(module is decoder for module in (model, adapted))
    ids = torch.arange(8, 14)[None]
    states = decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert states.last_hidden_state.shape == (1, 6, model.config.get_text_config().hidden_size)
    trained = [name for name, p in decoder.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lora_" in name for name, _ in copy.deepcopy(adapted).unload().named_modules())


@pytest.mark.parametrize(
    ("kind", "wanted"), [("constant", [1, 1]), ("linear", [1, 0.5]), ("cosine", [1, 0.5])]
)
def test_a_schedule_is_a_share_of_the_rate_that_a_state_brings_back(kind, wanted):
    def begin():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=2.0)
        steps = {"num_warmup_steps": 0, "num_training_steps": 2}
        return optimizer, get_scheduler(kind, optimizer, **steps)

    optimizer, scheduler = begin()
    rates = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    scheduler.step()
    again = begin()
    for new, old in zip(again, (optimizer, scheduler), strict=True):
        new.load_state_dict(old.state_dict())
    rates.append(again[0].param_groups[0]["lr"])
    assert rates == pytest.approx([2 * share for share in wanted])
