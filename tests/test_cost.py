"""The least cost of tokens, and the share of a GPU's speed that it amounts to."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_families import build
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import EngineConfig, RolloutEngine
from rollout.model.mixers import state_layout
from rollout.model.twin import Twin
from rollout.support import attending_layers, experts_of
from rollout.telemetry.roofline import Cost, contexts, peak_operations
from rollout.tools.workload import SHAPES
from trainers.reporting import utilisation
from trainers.reporting.utilisation import Utilisation


def cost_of(model):
    return Cost.of(model, Twin(model).kv_layout(page_tokens=1).page_bytes)


def test_each_new_token_reads_its_row_so_far():
    assert contexts([50, 50], [3, 1]) == (50 + 51 + 52) + 50
    assert contexts([7], [0]) == contexts([], []) == 0


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["apart", "tied"])
def test_the_twin_costs_what_its_model_does(changes):
    """The twin has one parameter per use of a tied weight."""
    model = tiny.build(**changes)
    assert Cost.of(Twin(model).base, 768) == cost_of(model) == cost_of(tiny.build())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_operations_of_products_are_those_that_torch_counts(family, tied):
    model = tiny.build(family, tie_word_embeddings=tied)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.ones(1, 10, dtype=torch.int64))
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    # Only matrix products count: norms have none.
    assert cost_of(model).operations(10, 0) == products


def test_attention_is_four_operations_a_head_dimension():
    cost = cost_of(tiny.build("qwen3"))
    assert cost.operations(0, 10) == 10 * 3 * 4 * 4 * 16  # layers, 4, heads, head size
    assert cost_of(tiny.build("llama")).context_operations == 3 * 4 * 48


def test_a_token_meets_its_own_experts_and_a_step_reads_all():
    dense, sparse = tiny.build("qwen3"), tiny.build("qwen3_moe")
    one = sum(p.numel() for name, p in sparse.named_parameters() if "expert" in name) // 4
    others = sum(p.numel() for name, p in sparse.named_parameters() if "expert" not in name)
    vectors = sum(p.numel() for p in sparse.parameters() if p.dim() == 1)
    embedding = sparse.get_input_embeddings().weight.numel()
    met = others + 2 * one - vectors - embedding
    assert cost_of(sparse).token_operations == 2 * met
    assert cost_of(sparse).weight_bytes == 4 * (others + 4 * one - embedding)
    weights = 3 * cost_of(dense).weight_bytes
    assert cost_of(dense).decode_bytes(3, 4, 5) == weights + 5 * 2 * 3 * 2 * 64


def test_a_hybrid_attends_in_some_layers_and_moves_its_states():
    model = build("qwen3_5_text")
    twin = Twin(model)
    cost = Cost.of(model, 10, twin.state_layout().lane_bytes)
    assert cost.context_operations == 4 * 1 * 4 * 16  # one of three layers attends
    states = 2 * 4 * 8 * 8 * 4  # layers, heads, values, keys, float32
    inputs = 2 * (2 * 2 * 8 + 4 * 8) * 3 * 4  # layers, queries, keys and values, taps, float32
    assert 2 * (states + inputs) <= cost.state_bytes < 2 * (states + inputs + 2 * 256)
    weights = cost.weight_bytes
    assert cost.decode_bytes(3, 5, 7) == 3 * weights + 5 * cost.state_bytes + 7 * 10
    assert cost == worker_cost(model, 10)
    assert list(experts_of(model)) == []


def test_a_state_of_the_9b_shape_is_worth_1572_tokens():
    """Sizes of the design: 24 layers of 2 MiB and 48 KiB each; 32 KiB of KV a token."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**SHAPES["qwen3.5-9b"])
        model = AutoModelForCausalLM.from_config(config)
    state = state_layout(model, torch.bfloat16).lane_bytes
    assert state == 24 * (2 * 2**20 + 48 * 2**10)
    assert state // (2 * 2 * 4 * 256 * len(attending_layers(model))) == 1572


def worker_cost(model, kv_token_bytes):
    with RolloutEngine(model, EngineConfig(max_rows=2, page_tokens=4)) as engine:
        return replace(engine.cost(), kv_token_bytes=kv_token_bytes)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 9090", None),
        ("Tesla V100", None),
    ],
)
def test_peaks_are_found_by_whole_names(name, peak):
    assert peak_operations(name) == peak


def engine_on(device):
    cost = Cost(weight_bytes=1000, kv_token_bytes=10, token_operations=7, context_operations=3)
    return SimpleNamespace(device=torch.device(device), cost=lambda: cost)


STATS = SimpleNamespace(
    engine_steps=4,
    duration_s=2.0,
    prefilled_tokens=2,
    attended_tokens=3,
    shares=SimpleNamespace(busy_s=1.5),
)
PROMPTS, LENGTHS = [[1, 2, 3], [1, 2, 3], [9]], [2, 3, 1]


def test_a_gpus_shares_are_what_was_needed_over_what_it_could(monkeypatch):
    monkeypatch.setattr(utilisation, "copy_bandwidth", lambda source, target: 1e4)
    monkeypatch.setattr(utilisation, "peak_operations", lambda name: 500.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = Utilisation(engine_on("cuda")).metrics(STATS, PROMPTS, LENGTHS)
    read = (3 + 4) + (3 + 4 + 5) + 1
    assert found["rollout/gpu_busy"] == pytest.approx(1.5 / 2)
    assert found["rollout/mbu"] == pytest.approx((4 * 1000 + read * 10) / 1e4 / 2)
    # The first two tokens of the shared prompt count once; they attend to 1 + 2 tokens.
    assert found["rollout/mfu"] == pytest.approx(((6 + 2) * 7 + (read + 3) * 3) / 500 / 2)
    monkeypatch.setattr(utilisation, "peak_operations", lambda name: None)
    found = Utilisation(engine_on("cuda")).metrics(STATS, PROMPTS, LENGTHS)
    assert list(found) == ["rollout/gpu_busy", "rollout/mbu"]


def test_prompts_cost_what_had_to_be_computed_of_them(monkeypatch):
    """A later turn reuses KV, and preempted rows are computed again."""
    monkeypatch.setattr(utilisation, "copy_bandwidth", lambda source, target: 1e4)
    monkeypatch.setattr(utilisation, "peak_operations", lambda name: 1.0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    def operations(prefilled, attended):
        stats = SimpleNamespace(**vars(STATS))
        stats.prefilled_tokens, stats.attended_tokens = prefilled, attended
        found = Utilisation(engine_on("cuda")).metrics(stats, PROMPTS, LENGTHS)
        return found["rollout/mfu"] * stats.duration_s

    assert operations(2, 3) - operations(1, 2) == pytest.approx(7 + 3)
    assert operations(5, 9) == operations(2, 3)


def test_weights_cost_what_they_do_in_the_rollout(monkeypatch):
    """Under FSDP and DeepSpeed, weights are cast after the engine was made."""
    monkeypatch.setattr(utilisation, "copy_bandwidth", lambda source, target: 1e4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    engine = engine_on("cuda")
    watch = Utilisation(engine)
    before = watch.metrics(STATS, PROMPTS, LENGTHS)["rollout/mbu"]
    half = Cost(weight_bytes=500, kv_token_bytes=5, token_operations=7, context_operations=3)
    engine.cost = lambda: half
    assert watch.metrics(STATS, PROMPTS, LENGTHS)["rollout/mbu"] == pytest.approx(before / 2)


def test_a_cpu_has_none():
    assert Utilisation(engine_on("cpu")).metrics(STATS, PROMPTS, LENGTHS) == {}
