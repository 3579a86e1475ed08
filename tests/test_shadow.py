"""Weights that the engine holds itself, because the trainer shards or quantises them."""

import pytest
import tiny
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel
from rollout.model.twin import Twin

CONFIG = EngineConfig(max_rows=4, page_tokens=4, prefill_tokens=20, num_slots=2)
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.fixture(autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model, dtype=None):
    """Shard each layer, then the rest, as accelerate does."""
    options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(dtype)}
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def trainers_own(*_):
    raise AssertionError("the rollout runs what the trainer has compiled for itself")


def rows_of(engine, **options):
    completions = engine.generate(tiny.prompts(6, seed=5), SAMPLING, **options)
    return [(completion.token_ids, completion.logprobs) for completion in completions]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe"])
def test_rollouts_of_a_sharded_model_are_those_of_the_whole_one(family, fused):
    whole, model = tiny.build(family), tiny.build(family)
    config = EngineConfig(**{**vars(CONFIG), "fuse_projections": fused})
    with RolloutEngine(whole, config) as engine, RolloutEngine(model, config) as other:
        assert rows_of(other) == rows_of(engine)
        shard(model)  # as `train()` does after `attach`
        model.model.layers[1].compile(backend=trainers_own)
        for _ in range(2):
            assert rows_of(other) == rows_of(engine)
            other.sleep()
            assert other.worker.twin.missing_bytes > 0
            with torch.no_grad():
                for each in (whole, model):
                    for parameter in each.parameters():
                        parameter.mul_(1.1)
        assert rows_of(other, same_weights=True) == rows_of(engine)
        assert isinstance(model, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_find_shadowed_have_the_dtype_of_the_trainers_forward(tied):
    model = shard(tiny.build(tie_word_embeddings=tied), torch.bfloat16)
    twin = Twin(model, param_dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in twin.base.parameters()} == {torch.bfloat16}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert twin.shadow_bytes == 2 * numbers
    head, embedding = twin.base.lm_head.weight, twin.base.model.embed_tokens.weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied
    ids = torch.tensor([tiny.prompts(1, seed=3)[0]])
    model.eval()
    twin.base.config._attn_implementation = "sdpa"
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(twin.base(ids).logits, wanted.bfloat16())
        assert not isinstance(model.lm_head.weight, DTensor)  # that forward leaves it gathered
        twin.refresh()
    assert isinstance(model.lm_head.weight, DTensor)


def test_adapters_of_a_sharded_model_are_followed():
    config = LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    model = get_peft_model(tiny.build(), config)
    shard(model.get_base_model())
    with RolloutEngine(model, CONFIG) as engine:
        on = rows_of(engine)
        with model.disable_adapter():
            off = rows_of(engine)
        assert on != off
        assert rows_of(engine) == on
    with RolloutEngine(tiny.build(), CONFIG) as plain:
        assert rows_of(plain) == off


def quantised():
    """A model with a layer as bitsandbytes stores it: two numbers per byte, typed float16."""
    model = tiny.build()
    linear = model.model.layers[1].mlp.up_proj
    packed = torch.zeros(linear.weight.numel() // 4, 1, dtype=torch.float16)
    linear.quant_state, linear.weight = object(), torch.nn.Parameter(packed, requires_grad=False)
    return model, linear


def test_4_bit_weights_are_never_cast_whatever_dtype_their_bytes_are_stored_in():
    model, layer = quantised()
    linears = [each for each in model.modules() if isinstance(each, torch.nn.Linear)]
    numbers = sum(each.weight.numel() for each in linears if each is not layer)
    twin = Twin(model, torch.bfloat16)
    assert twin.shadow_bytes == 2 * numbers
    assert twin.base.model.layers[1].mlp.up_proj.weight.data_ptr() == layer.weight.data_ptr()


def test_parts_of_4_bit_weights_are_refused():
    model, layer = quantised()
    layer.weight.ds_id = 7  # as ZeRO-3 marks them
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj is a 4-bit .* use DDP"):
        Twin(model)
