"""What `trainers/` and `rollout/` lean on in TRL and transformers, by signature and behaviour.

Where one of these fails on another version, the code needs a look before that version is added.
Nothing here attaches an engine, which would refuse a TRL that it does not know.
"""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import pytest
import tiny
import torch
import trl_family
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from rollout.attention import _HARMLESS
from trainers.seams import SEAMS

SEAM = ("prompts", "images", "num_generations", "profiler")
each_kind = pytest.mark.parametrize("kind", tuple(trl_family.HOMES))
each_family = pytest.mark.parametrize("family", tiny.FAMILIES)


class Stub:
    """What a trainer sees of a generator; two tokens a row, and notes of how it was called."""

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
    """Attribute -> expression, of what a constructor sets only where it is to use vLLM."""
    found: dict[str, str] = {}

    def note(statements):
        for node in statements:
            for child in ast.walk(node):
                if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Attribute):
                    found[child.targets[0].attr] = ast.unparse(child.value)

    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.If) and for_vllm(node.test):
            note(node.body)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            note([node] if for_vllm(node.value.test) else [])
    return found


@each_kind
def test_the_table_says_what_the_constructor_sets(kind):
    """Names and values, read from the source of the TRL that is installed."""
    found = sets_for_vllm(inspect.getsource(trl_family.trainer_class(kind).__init__))
    assert found.pop("vllm_generation").startswith("VLLMGeneration(")
    args = SimpleNamespace(vllm_sync_frequency=3)
    trainer = SimpleNamespace(use_vllm=True, vllm_sync_frequency=3)
    values = {name: eval(text, {"args": args, "self": trainer}) for name, text in found.items()}
    assert values == SEAMS[f"{kind}Trainer"].sets(args)


def test_what_a_constructor_sets_is_found():
    source = """
        def __init__(self, args):
            self.use_vllm = args.use_vllm
            self.step = -1 if self.use_vllm else 0
            if self.use_vllm:
                self.vllm_generation = VLLMGeneration(args)
                if args.mode == "server":
                    self.client = 1
            else:
                self.generation_config = None
            if not (args.use_vllm and args.mode == "server"):
                raise ValueError
    """
    assert set(sets_for_vllm(source)) == {"step", "vllm_generation", "client"}


@each_kind
def test_a_trainer_generates_through_what_the_table_names(kind, tmp_path):
    """One step with a stub for a generator, put in place by the table alone."""
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


def test_the_tool_loop_reads_the_length_limit():
    source = inspect.getsource(GRPOTrainer._tool_call_loop)
    assert "self.vllm_generation.llm.llm_engine.model_config.max_model_len" in source


def test_scores_carry_both_log_probabilities_and_the_ratio():
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    names = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
    for name in (*names, "tool_mask"):
        assert f'output["{name}"]' in source


def test_the_raw_ratio_is_computed_as_ours_is():
    """The sign, the mask, and the modes that sum over a sequence."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert "(old_per_token_logps - sampling_per_token_logps) * mask" in source
    assert 'in ["sequence_mask", "sequence_truncate"]' in source
    assert "per_token_logps_diff.sum(dim=-1, keepdim=True)" in source
    assert "torch.exp(logps_diff)" in source


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
    """What a family hands to an attention function that is registered by name."""
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


def test_no_mask_is_built_for_an_attention_without_a_mask_function():
    assert [mask for mask, _ in run_with("qwen3")] == [None] * 3


def test_a_mask_function_is_asked_by_the_attentions_name():
    def mask(*_, attention_mask=None, **others):
        return attention_mask

    calls = run_with("qwen3", mask=mask)
    assert [found.shape for found, _ in calls] == [(1, 6)] * 3


def test_our_attentions_are_in_the_registry():
    import rollout.trainer_attention  # noqa: F401

    assert {"twinslot_paged", "twinslot_exact"} <= set(ALL_ATTENTION_FUNCTIONS.keys())


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
