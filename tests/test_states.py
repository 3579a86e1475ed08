"""Recurrent states in lanes: each token is fed once, to the state of its own row."""

import logging
import shutil
from dataclasses import replace
from functools import partial

import fakes
import families
import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from test_families import build, largest_gap
from torch._dynamo.utils import counters

from rollout import EngineConfig, RolloutEngine, SamplingParams, UnsupportedModel
from rollout.kernels.recurrent import delta_rule, short_conv
from rollout.memory.states import StateLayout, States
from rollout.model.twin import Twin
from rollout.scheduler.pages import pages_for

pytest.importorskip("triton")
from rollout.kernels.recurrent import delta_rule_triton, short_conv_triton

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = EngineConfig(max_rows=4, page_tokens=4, prefill_tokens=17, num_slots=2)
EACH = pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])


def groups(count, longest=90):
    """Groups of three rows of different lengths, one token at least."""
    prompts = [prompt for prompt in tiny.prompts(count, longest, seed=7) for _ in range(3)]
    limits = [1 + (7 * n) % 30 for n in range(len(prompts))]
    return prompts, [SamplingParams(max_new_tokens=n, eos_token_ids=(n + 20,)) for n in limits]


def rows_of(engine, work):
    with engine:
        return [(c.token_ids, c.logprobs) for c in engine.generate(*work)]


# --- the engine, with a model whose state is a hash


@pytest.fixture(scope="module")
def hybrid():
    return build("lfm2")


@pytest.fixture(scope="module")
def alone(hybrid):
    """Each row by itself."""
    prompts, sampling = groups(5)
    with fakes.with_hash_model(RolloutEngine(hybrid, replace(CONFIG, max_rows=1))) as engine:
        done = [
            engine.generate([prompt], [how], [seed])[0]
            for seed, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))
        ]
    return [(each.token_ids, each.logprobs) for each in done]


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("max_rows", [2, 4, 15])
@pytest.mark.parametrize("prefill_tokens", [17, 8192])
def test_rows_are_as_alone_on_a_device_that_lags(
    hybrid, alone, num_slots, max_rows, prefill_tokens
):
    changes = {"num_slots": num_slots, "max_rows": max_rows, "prefill_tokens": prefill_tokens}
    engine = fakes.with_hash_model(RolloutEngine(hybrid, replace(CONFIG, **changes)))
    with fakes.with_lagging_device(engine):
        assert rows_of(engine, groups(5)) == alone


def test_rows_that_are_preempted_are_computed_again(hybrid, alone):
    with RolloutEngine(hybrid, CONFIG) as engine:
        page, lane = engine.worker.kv_cache.layout.page_bytes, engine.worker.states
        size = 34 * page + lane.bytes_for(4)
    engine = fakes.with_hash_model(RolloutEngine(hybrid, replace(CONFIG, kv_bytes=size)))
    with fakes.with_lagging_device(engine):
        assert rows_of(engine, groups(5)) == alone
        assert engine.stats.preemptions > 0


def test_rows_that_come_and_go_meanwhile_leave_the_others_alone(hybrid, alone):
    prompts, sampling = groups(5)
    engine = fakes.with_hash_model(RolloutEngine(hybrid, CONFIG))
    with fakes.with_lagging_device(engine):
        ids = engine.submit_all(prompts[:9], sampling[:9], range(9))
        dropped, done = {ids[0], ids[4]}, {}
        for step in range(1000):
            if step == 2:
                ids += engine.submit_all(prompts[9:], sampling[9:], range(9, 15))
            if step == 3:
                engine.abort(dropped)
            done |= {each.row: each for each in engine.step()}
            if not engine.busy:
                break
        for row, wanted in zip(ids, alone, strict=True):
            if row not in dropped:
                assert (done[row].token_ids, done[row].logprobs) == wanted


def test_a_row_in_a_high_lane_stays_there_when_others_come(hybrid):
    with fakes.with_hash_model(RolloutEngine(hybrid, CONFIG)) as engine:
        lengths = [SamplingParams(max_new_tokens=n) for n in (1, 1, 1, 9)]
        engine.submit_all([[9], [10], [11], [12]], lengths)
        for _ in range(4):
            engine.step()
        assert engine.num_live == 1
        engine.submit([13], SamplingParams(max_new_tokens=2))
        engine.scheduler.check()
        done = []
        while engine.busy:
            done += engine.step()
        assert sorted(len(each.token_ids) for each in done) == [2, 9]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_pause_keeps_states_or_computes_them_again(hybrid, alone, kv):
    engine = fakes.with_hash_model(RolloutEngine(hybrid, CONFIG))
    prompts, sampling = groups(5)
    with fakes.with_lagging_device(engine):
        ids, done, step = engine.submit_all(prompts, sampling, range(15)), {}, 0
        while engine.busy:
            done |= {each.row: each for each in engine.step()}
            step += 1
            if step % 25 == 0:
                with engine.paused(kv, same_weights=True):
                    pass
        assert [(done[row].token_ids, done[row].logprobs) for row in ids] == alone


def test_states_go_when_the_engine_sleeps(hybrid, alone):
    engine = fakes.with_hash_model(RolloutEngine(hybrid, CONFIG))
    with engine:
        states = engine.worker.states
        for _ in range(2):
            completions = engine.generate(*groups(5))
            assert [(c.token_ids, c.logprobs) for c in completions] == alone
            num_bytes = states.num_bytes
            assert num_bytes == states.bytes_for(4) > 0
            engine.sleep()
            assert states.num_bytes == 0
            assert engine.asleep
            engine.wake()
            assert states.num_bytes == num_bytes


@EACH
def test_padding_rows_leave_every_lane_alone_and_are_finite(family):
    with RolloutEngine(build(family), CONFIG) as engine:
        engine.submit([9, 10, 11], SamplingParams(max_new_tokens=4))
        engine.step()
        forward, states = engine.worker.graphs.forward, engine.worker.states
        parts = [states.conv(layer) for layer in range(2)]
        parts += [states.state(layer) for layer in range(2) if family != "lfm2"]
        for part in parts:
            part[0] = torch.nan  # the trash lane's slot
        before = [part.clone() for part in parts]
        with torch.no_grad():
            _, scores = forward.decode(torch.tensor([forward.lanes.trash_lane] * 3), max_context=1)
        assert scores.isfinite().all()
        for part, old in zip(parts, before, strict=True):
            assert torch.equal(part[1:], old[1:])


# --- memory


def test_fewer_rows_run_at_once_where_their_states_do_not_fit(hybrid, alone, caplog):
    with RolloutEngine(hybrid, CONFIG) as engine:
        page, states = engine.worker.kv_cache.layout.page_bytes, engine.worker.states
        tokens = [len(p) + how.max_new_tokens - 1 for p, how in zip(*groups(5), strict=True)]
        size = (1 + pages_for(max(tokens), 4)) * page + states.bytes_for(2)
    engine = fakes.with_hash_model(RolloutEngine(hybrid, replace(CONFIG, kv_bytes=size)))
    with caplog.at_level(logging.WARNING), engine:
        for _ in range(2):
            completions = engine.generate(*groups(5))
            assert [(c.token_ids, c.logprobs) for c in completions] == alone
        assert engine.worker.states.num_lanes == 2
        assert engine.worker.plan().states == states.bytes_for(2)
    messages = [record.message for record in caplog.records if "run at once" in record.message]
    assert messages == ["2 of 4 rows run at once: each keeps a state of 0.0 MiB"]


def test_a_rollout_of_few_rows_has_few_states(hybrid):
    with RolloutEngine(hybrid, replace(CONFIG, max_rows=256)) as engine:
        engine.generate([[9, 10]] * 3, SamplingParams(max_new_tokens=2))
        assert engine.worker.states.num_lanes == 3
        plan = {line.name: line for line in engine.worker.plan().lines}
        assert plan["states"].num_bytes == 4 * engine.worker.states.layout.lane_bytes
        assert "for each of 3 rows" in plan["states"].remark


def test_lanes_are_copied_in_one_piece_and_keep_apart():
    layout = StateLayout(
        num_layers=3, conv_shape=(5, 2), conv_dtype=torch.bfloat16, state_shape=(2, 3, 4)
    )
    states = States(layout, max_lanes=4, device=CPU)
    states.grow(2)
    for layer in range(3):
        for lane in range(2):
            states.conv(layer)[states.slot(lane)] = 10 * layer + lane
            states.state(layer)[states.slot(lane)] = 100 + 10 * layer + lane
    states.grow(4)
    states.copy(1, 3)
    for layer in range(3):
        for lane, source in ((0, 0), (1, 1), (3, 1)):
            assert (states.conv(layer)[states.slot(lane)] == 10 * layer + source).all()
            assert (states.state(layer)[states.slot(lane)] == 100 + 10 * layer + source).all()
    assert states.conv(0).shape == (5, 5, 2)
    assert states.state(0).shape == (5, 2, 3, 4)
    slots = states.slots(torch.tensor([0, 3, 4]))  # lane 4 is the trash lane
    assert slots.tolist() == [states.slot(lane) for lane in (0, 3, 4)] == [1, 4, 0]


# --- what the layers compute


def test_a_short_convolution_decodes_as_it_prefills():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((11, 6), (6, 4)))
    whole = torch.full((3, 6, 3), torch.nan)
    wanted = short_conv.prefill(x, weight, None, whole, [(1, 0, 11)])
    pool = torch.full((3, 6, 3), torch.nan)
    parts = [short_conv.prefill(x[:2], weight, None, pool, [(1, 0, 2)])]
    parts += [short_conv.prefill(x[2:7], weight, None, pool, [(1, 2, 5)])]
    for position in range(7, 11):
        place = torch.tensor([1]), torch.tensor([position])
        parts.append(short_conv.decode(x[position : position + 1], weight, None, pool, *place))
    torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(pool[1], whole[1])
    assert pool[[0, 2]].isnan().all()


def delta_inputs(num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_tokens, 2, 8), (num_tokens, 2, 8), (num_tokens, 4, 6))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    decay = -torch.rand((num_tokens, 4), generator=generator)
    beta = torch.rand((num_tokens, 4), generator=generator)
    return [each.to(dtype) for each in (query, key, value, decay, beta)]


def plain_delta_rule(query, key, value, decay, beta):
    """By its definition, token by token, in float64."""
    outputs, state = [], torch.zeros(4, 6, 8, dtype=torch.float64)
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = q.repeat_interleave(2, 0) * 8**-0.5, k.repeat_interleave(2, 0)
        state = g.exp()[:, None, None] * state
        missing = v - torch.einsum("hvk,hk->hv", state, k)
        state = state + torch.einsum("h,hv,hk->hvk", b, missing, k)
        outputs.append(torch.einsum("hvk,hk->hv", state, q))
    return torch.stack(outputs), state


def test_the_delta_rule_is_its_definition_prefilled_and_decoded():
    inputs, pool = delta_inputs(80), torch.full((3, 4, 6, 8), torch.nan)
    wanted, last = plain_delta_rule(*delta_inputs(80, torch.float64))
    parts, begin = [], 0
    for end in (64, 70):
        part = [each[begin:end] for each in inputs]
        parts.append(delta_rule.prefill(*part, pool, [(2, begin, end - begin)], normalised=True))
        begin = end
    for position in range(70, 80):
        token = [each[position : position + 1] for each in inputs]
        place = torch.tensor([2]), torch.tensor([position])
        parts.append(delta_rule.decode(*token, pool, *place, normalised=True))
    torch.testing.assert_close(torch.cat(parts).double(), wanted, rtol=0, atol=2e-6)
    torch.testing.assert_close(pool[2].double(), last, rtol=0, atol=2e-6)
    assert pool[:2].isnan().all()


@pytest.mark.parametrize(("spec", "count"), [(None, 1), ("found", 0)])
def test_a_missing_fla_is_said_once(caplog, monkeypatch, spec, count):
    monkeypatch.setattr(delta_rule, "find_spec", lambda name: spec)
    delta_rule.warn_without_fla.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            delta_rule.warn_without_fla()
    messages = [record.message for record in caplog.records]
    assert len(messages) == count
    assert all("pip install fla-core einops" in message for message in messages)


def test_a_first_token_begins_from_zeros_whatever_the_slot_holds():
    inputs, pool = delta_inputs(1), torch.full((2, 4, 6, 8), torch.nan)
    place = torch.tensor([1]), torch.tensor([0])
    output = delta_rule.decode(*inputs, pool, *place, normalised=True)
    wanted, _ = plain_delta_rule(*delta_inputs(1, torch.float64))
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-6)


# --- whole models


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("family", families.HYBRIDS)
def test_compiled_layers_give_the_models_numbers(family):
    torch.compiler.reset()
    engine = replace(CONFIG, compile_layers=True, max_rows=3)
    assert largest_gap(build(family), engine) < 2e-5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_recurrent_layers_share_one_compilation_and_attending_layers_another():
    torch.compiler.reset()
    counters.clear()
    types = ["linear_attention", "full_attention"] * 4
    model = build("qwen3_5_text", layer_types=types, num_hidden_layers=8)
    assert largest_gap(model, replace(CONFIG, compile_layers=True)) < 2e-5
    assert counters["stats"]["unique_graphs"] == 2


@EACH
def test_groups_of_long_prompts_under_preemption_and_new_weights(family):
    model = build(family)
    with RolloutEngine(model, CONFIG) as engine:
        size = 34 * engine.worker.kv_cache.layout.page_bytes + engine.worker.states.bytes_for(4)
    prompts, sampling = groups(5)
    with RolloutEngine(model, replace(CONFIG, kv_bytes=size)) as engine:
        for version in range(2):
            completions = engine.generate(prompts, sampling)
            assert engine.stats.preemptions > 0 or version  # whose lengths are known
            for prompt, completion in zip(prompts, completions, strict=True):
                wanted = tiny.logprobs(model, prompt, completion.token_ids)
                assert completion.logprobs == pytest.approx(wanted.tolist(), abs=2e-5)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)


@EACH
def test_adapters_of_recurrent_layers_run(family):
    lora = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    model = get_peft_model(build(family), lora)
    for fuse in (False, True):
        with RolloutEngine(model, replace(CONFIG, fuse_projections=fuse)) as engine:
            tiny.assert_on_policy(engine, model)


@EACH
def test_under_autocast_states_have_the_dtypes_that_the_model_computes_in(family):
    twin = Twin(build(family), torch.bfloat16)
    layout = twin.state_layout()
    assert layout.conv_dtype == torch.bfloat16
    assert layout.num_layers == 2
    assert twin.kv_layout(4).num_layers == 1
    assert (layout.state_shape is None) == (family == "lfm2")


@EACH
def test_exact_mode_is_refused(family):
    with pytest.raises(
        UnsupportedModel, match=r"recurrent layers train in chunks.*'close' runs it"
    ):
        RolloutEngine(build(family), replace(CONFIG, on_policy="exact"))


def test_models_without_states_have_none():
    with RolloutEngine(tiny.build(), CONFIG) as engine:
        assert engine.worker.states is None
        assert engine.worker.plan().states == 0


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", families.HYBRIDS)
def test_captured_steps_give_the_models_numbers(family, compiled):
    """With padding rows, groups, preemption and chunks, on a GPU; the reference runs on a CPU."""
    model = build(family).to(DEVICE)
    config = replace(CONFIG, page_tokens=16, prefill_tokens=64, compile_layers=compiled)
    with RolloutEngine(model, config) as engine:
        size = 14 * engine.worker.kv_cache.layout.page_bytes + engine.worker.states.bytes_for(4)
    prompts, sampling = groups(5)
    with RolloutEngine(model, replace(config, kv_bytes=size)) as engine:
        completions = engine.generate(prompts, sampling)
        assert engine.num_graphs > 0
        assert engine.worker.graphs.num_eager == 0
        assert engine.worker.twin.compiled == compiled
    model = model.to(CPU)
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = tiny.logprobs(model, prompt, completion.token_ids)
        assert completion.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


# --- kernels, in Triton's interpreter on a CPU


def spread(states):
    """The same numbers in rows that are further apart, as parts of one product are."""
    wide = states.new_full((len(states), 3 * states[0].numel()), torch.nan)
    part = wide[:, : states[0].numel()]
    part.copy_(states.flatten(1))
    return part.unflatten(1, states.shape[1:])


# Slots out of order, a row at its first token, and two rows of padding.
SLOTS, POSITIONS = torch.tensor([4, 0, 2, 6, 0, 3]), torch.tensor([7, 0, 3, 0, 0, 1])


def pool_of(shape, dtype=torch.float32):
    pool = torch.randn((8, *shape), generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    pool[[0, 6]] = torch.nan  # the trash lane's, and that of the row at its first token
    return pool


# In bf16 the two may round to neighbours.
CLOSE = {torch.float32: {"rtol": 0, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


def assert_kernel_is_its_definition(kernel, definition, inputs, pool):
    wanted_pool, where = pool.clone(), (SLOTS.to(DEVICE), POSITIONS.to(DEVICE))
    wanted = definition(*inputs, wanted_pool, *where)
    output = kernel(*map(spread_rows, inputs), pool, *where)
    rows = SLOTS > 0
    torch.testing.assert_close(output[rows], wanted[rows], **CLOSE[output.dtype])
    assert output.isfinite().all()
    mine = SLOTS[rows]
    torch.testing.assert_close(pool[mine], wanted_pool[mine], **CLOSE[pool.dtype])
    others = torch.tensor([1, 5, 7])
    assert torch.equal(pool[others], wanted_pool[others])
    assert pool[0].isnan().all()


def spread_rows(each):
    return spread(each) if isinstance(each, torch.Tensor) and each.dim() == 3 else each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (1, 3, 24, 40)], ids=str)
@pytest.mark.parametrize("normalised", [True, False])
def test_the_delta_rules_kernel_is_its_definition(dtype, sizes, normalised):
    key_heads, heads, keys, values = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, key_heads, keys), (6, key_heads, keys), (6, heads, values))
    inputs = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    inputs.append(-torch.rand((6, heads), generator=generator).to(DEVICE))
    inputs.append(torch.rand((6, heads), generator=generator).to(DEVICE, dtype))
    if not normalised:
        inputs[1] /= 8.0
    kernel, plain = (
        partial(each.decode, normalised=normalised) for each in (delta_rule_triton, delta_rule)
    )
    assert_kernel_is_its_definition(kernel, plain, inputs, pool_of((heads, values, keys)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [6, 300])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("biased", [True, False])
def test_the_short_convolutions_kernel_is_its_definition(dtype, channels, taps, biased):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(6, channels, generator=generator), torch.randn(channels, taps)
    bias = torch.randn(channels, generator=generator).to(DEVICE, dtype) if biased else None
    inputs = [x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias]
    pool = pool_of((channels, taps - 1), dtype)
    kernels = short_conv_triton.decode, short_conv.decode
    assert_kernel_is_its_definition(*kernels, inputs, pool)
