"""A model from its files in a replica's loop: answers side by side are as transformers generates each alone."""

import asyncio
import json
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from unittest.mock import Mock

import jsonschema
import numpy as np
import pytest
import torch

from benchmarks.simulation.virtual_time import run
from deployments.errors import SettingsError
from deployments.generation import planned_steps
from deployments.generation.emulated_devices import EMULATED_ACCELERATORS
from deployments.generation.engine import causal_stages, device_sampling, graphed_decoder, paged_attention
from deployments.generation.engine.device_sampling import TorchLogits
from deployments.generation.engine.factory import _quick_dtype, _room, create_step_engine
from deployments.generation.engine_thread import probe_work
from deployments.generation.frames import GenerationOffer, GenerationOffers
from deployments.generation.planned_steps import PlannedStep, measure, measure_host
from deployments.generation.scheduler.block_pool import BLOCK
from deployments.generation.scheduler.hybrid.host_cache import HostCache
from deployments.generation.scheduler.scheduler import StepScheduler
from deployments.generation.scheduler.state import StepPolicy
from deployments.generation.scheduler.step_time import HostTime, StepLoad, StepTime
from deployments.generation.scheduler.work import UNTIMED, Chunk, Work
from deployments.generation.settings import GenerationAcceleratorSettings, GenerationCpuSettings
from deployments.generation.step_loop import StepLoop
from deployments.generation.text.grammar import Grammars, json_grammar
from deployments.generation.text.model_card import read_generation_card
from deployments.generation.text.sampling import Sampling
from deployments.models.tokenizer_files import read_tokenizer
from deployments.settings import ModelSettings
from tests.kit.causal_models import causal, check
from tests.kit.packed_models import VOCABULARY
from tests.kit.tiny_tokenizers import qwen

MEMORY = "deployments.generation.engine.factory._free_memory"
BLOCK_BYTES = 2 * 2 * 2 * 32 * BLOCK * 4  # keys and values, layers, heads, numbers of each, tokens, float32


def saved(folder, family="llama", **changes):
    own = causal(family, **changes)
    own.save_pretrained(folder)
    return own, read_generation_card(ModelSettings(id=str(folder)))


def settings(**more):
    return GenerationCpuSettings.model_validate({"dtype": "float32", "blocks": 24, **more})


def with_host(**more):
    own = {"dtype": "float32", "device": "cpu", "blocks": 6, "num_cpu_blocks": 16}
    return GenerationAcceleratorSettings.model_validate({**own, **more})


def tokens_in(reports):
    tokens = {}
    for token in chain.from_iterable(report.tokens for report in reports):
        tokens.setdefault((token.number, token.answer), []).append(token.picked.id)
    return tokens


def generate(engine, offers, *later, grammars=None):
    """Side by side, a few joining later, in virtual time: a step takes as long as planned, whatever this machine is. By
    these times the host is so quick that answers on it are in the steps. `later`: turns of conversations, each made of
    all tokens so far. Returns the tokens, and how many of each prompt's were cached.
    """
    model = StepTime(1e-2, 1e-3, 1e-5, 1e-4, 0.0)
    host = (
        HostCache(HostTime(1e-5, 1e-8, 1e-8, engine.layers), engine.num_cpu_blocks) if engine.num_cpu_blocks else None
    )
    schedule = StepScheduler(model, StepPolicy(60.0, 10.0, 200), engine.blocks, host=host, block_size=engine.block_size)

    async def main():
        loop, router, ends_at = asyncio.get_running_loop(), Mock(unsent=0), 0.0

        def compute(work, ended):
            nonlocal ends_at
            found = work.run(engine.steps)._replace(compute_s=UNTIMED)
            ends_at = max(ends_at, loop.time()) + schedule.planned_s
            loop.call_at(ends_at, ended, found)

        stepper = StepLoop(schedule, compute, clock=loop.time, grammars=grammars)

        def reports():
            return [call.args[0] for call in router.send.call_args_list]

        for turn in (lambda _: offers, *later):
            for offer in turn(tokens_in(reports())):
                stepper.receive(router, GenerationOffers([offer]))
                await asyncio.sleep(0.01)
            await stepper.drained()
        assert stepper.state().free_blocks == engine.blocks
        return reports()

    reports = run(main())
    assert host is None or host.tokens > 0
    return tokens_in(reports), dict(chain.from_iterable(report.cached for report in reports))


@pytest.mark.parametrize(
    ("place", "block_size"), [(settings(), 128), (with_host(), 128), (settings(), 256)],
    ids=["alone", "with a host", "in blocks for flash attention"],
)  # fmt: skip
@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("qwen3", {"tie_word_embeddings": True})])
def test_greedy_tokens_are_those_of_transformers(tmp_path, monkeypatch, family, changes, place, block_size):
    own, card = saved(tmp_path, family, **changes)
    monkeypatch.setattr(paged_attention, "block_size_for", lambda *_, **__: block_size)
    engine = create_step_engine(card, place, "cpu", 1)
    assert engine.describe()["block_size"] == block_size
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCABULARY, length).astype(np.int32) for length in (5, 40, BLOCK, 300, 9)]
    answers = [1, 2, 3, 1, 1]
    offers = [
        GenerationOffer(number, 60.0, prompt, 24, Sampling(0.0), answers=count)
        for number, (prompt, count) in enumerate(zip(prompts, answers, strict=True))
    ]
    found, _ = generate(engine, offers)
    assert len(found) == sum(answers)
    for (number, _), tokens in found.items():
        assert len(tokens) == 24
        check(own, [*prompts[number].tolist(), *tokens], len(prompts[number]))


@pytest.mark.parametrize(
    ("place", "block_size", "others", "cached"),
    [
        (settings(), 128, 0, {2: 384, 3: 384, 4: 384, 5: 512}),
        (settings(), 128, 5, {2: 384, 3: 384, 4: 256, 5: 512}),
        (settings(), 256, 0, {2: 256, 3: 256, 4: 256, 5: 512}),
        (with_host(), 128, 0, None),
    ],
    ids=["alone", "pushed out by others", "in blocks for flash attention", "with a host"],
)
def test_conversations_that_find_their_blocks_are_answered_as_by_transformers(
    tmp_path, monkeypatch, place, block_size, others, cached
):
    """Two conversations side by side begin alike. Before their third turn, `others` come."""
    own, card = saved(tmp_path)
    monkeypatch.setattr(paged_attention, "block_size_for", lambda *_, **__: block_size)
    random, asked = np.random.default_rng(1), {}
    same = random.integers(0, VOCABULARY, 300).tolist()

    def offer(number, before, more, scope=b"a"):
        asked[number] = [*before, *random.integers(0, VOCABULARY, more).tolist()]
        return GenerationOffer(number, 60.0, np.array(asked[number], np.int32), 60, Sampling(0.0), cache_scope=scope)

    def turn(tokens):
        first = len(tokens)
        for talk in range(2):
            before = [*asked[first + talk - 2], *tokens[first + talk - 2, 0]] if first else same
            yield offer(first + talk, before, 30 + 70 * talk)

    def interlude(_):
        return [offer(100 + other, [], 400, None) for other in range(others)]

    def last(tokens):
        return turn({key: found for key, found in tokens.items() if key[0] < 100})

    found, hits = generate(create_step_engine(card, place, "cpu", 1), turn({}), turn, interlude, last)
    assert hits == (cached or hits)
    assert found.keys() == {(number, 0) for number in asked}
    for number, ids in asked.items():
        check(own, [*ids, *found[number, 0]], len(ids))


ENDS = (3, 60)
_BIAS = {11: 3.0, 40: -100.0, ENDS[0]: 100.0}


@pytest.mark.parametrize("logits", [None, TorchLogits], ids=["on the host", "on the device"])
@pytest.mark.parametrize("place", [settings(), with_host()], ids=["alone", "with a host"])
def test_greedy_tokens_with_rules_are_those_of_transformers(tmp_path, monkeypatch, place, logits):
    own, card = saved(tmp_path)
    for module in (device_sampling, causal_stages) if logits else ():
        monkeypatch.setattr(module, "logits_of", lambda _: logits)
    bias = {"logit_bias": tuple(_BIAS.items())}
    sequence_bias = {"sequence_bias": [[[token], added] for token, added in _BIAS.items()]}
    table = [
        ({}, {}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"repetition_penalty": 0.6}, {"repetition_penalty": 0.6}),
        (bias, sequence_bias),  # ends at once
        ({**bias, "min_tokens": 6}, {**sequence_bias, "min_new_tokens": 6}),
        ({**bias, "min_tokens": 9, "repetition_penalty": 1.5},
         {**sequence_bias, "min_new_tokens": 9, "repetition_penalty": 1.5}),
    ]  # fmt: skip
    random = np.random.default_rng(1)
    prompts = [random.integers(0, VOCABULARY, 200 + 20 * at).astype(np.int32) for at in range(len(table))]
    offers = [
        GenerationOffer(number, 60.0, prompt, 16, Sampling(0.0, **asked), end_tokens=ENDS)
        for number, (prompt, (asked, _)) in enumerate(zip(prompts, table, strict=True))
    ]
    found, _ = generate(create_step_engine(card, place, "cpu", 1), offers)
    for number, (prompt, (_, theirs)) in enumerate(zip(prompts, table, strict=True)):
        usual = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": list(ENDS), "pad_token_id": 0}
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        said = own.generate(ids, attention_mask=torch.ones_like(ids), **usual, **theirs)[0, len(prompt) :]
        assert found[number, 0] == said.tolist(), (number, theirs)
    assert found[3, 0] == [ENDS[0]]
    assert (len(found[4, 0]), len(found[5, 0])) == (7, 10)


@pytest.mark.parametrize("place", [settings(), with_host()], ids=["alone", "with a host"])
def test_answers_with_a_grammar_are_its_json_and_end_beside_others(tmp_path, place):
    qwen(tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    end = tokenizer.token_to_id("<|im_end|>")
    _, card = saved(tmp_path, "qwen2", vocab_size=tokenizer.get_vocab_size() + 50)
    grammars = Grammars(lambda: tokenizer, card.model.vocab_size, [end])
    properties = {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "additionalProperties": False}
    bound = Sampling(1.0, grammar=json_grammar(schema))
    prompts = [np.arange(5, 5 + length, dtype=np.int32) for length in (5, 40, 9, 7)]
    asked = [replace(bound, seed=1), Sampling(1.0, seed=2), replace(bound, seed=3), replace(bound, seed=4)]
    answers = [3, 1, 1, 1]
    offers = [
        GenerationOffer(number, 60.0, prompt, 200, one, answers=count, end_tokens=(end,))
        for number, (prompt, one, count) in enumerate(zip(prompts, asked, answers, strict=True))
    ]
    found, _ = generate(create_step_engine(card, place, "cpu", 1), offers, grammars=grammars)
    for (number, _), (*ids, last) in found.items():
        if number != 1:
            jsonschema.validate(json.loads(tokenizer.decode(ids)), schema)
            assert last == end
    assert len(found) == sum(answers)
    grammars.close()


def test_steps_run_as_graphs_except_with_a_host(tmp_path, monkeypatch):
    _, card = saved(tmp_path)
    cache = SimpleNamespace(tensor=None)
    graphed = SimpleNamespace(cache=cache, step=lambda chunks: torch.full((len(chunks), VOCABULARY), 7.0))
    asked = []
    monkeypatch.setattr(graphed_decoder, "with_graphs", lambda model, context: asked.append(context) or graphed)
    engine = create_step_engine(card, settings(), "cpu", 1)
    assert asked == [card.context]
    assert (engine.steps.step(Work([Chunk(np.zeros(3, np.int32), 0, [0])])).logits.logits == 7).all()
    create_step_engine(card, with_host(), "cpu", 1)
    assert len(asked) == 1


@pytest.mark.parametrize("place", [settings(), with_host()], ids=["alone", "with a host"])
def test_a_probe_runs_the_model(tmp_path, place):
    own, card = saved(tmp_path)
    engine = create_step_engine(card, place, "cpu", 1)
    work = probe_work(engine.blocks - 1)
    ((picked,),) = work.run(engine.steps).picked
    prompt = work.work.chunks[0].ids.tolist()
    check(own, [*prompt, picked.id], len(prompt))


def test_the_first_times_of_steps_come_from_a_few_of_them(tmp_path, monkeypatch):
    _, card = saved(tmp_path)
    monkeypatch.setattr(planned_steps, "_WARM_UP_S", 0.0)
    engine, alone = (create_step_engine(card, place, "cpu", 1) for place in (with_host(), settings()))
    assert measure(engine, card).seconds(StepLoad(1, 32)) > 0
    took = measure_host(engine, card)
    assert took.row_s + took.kv_token_s > 0
    assert (took.layers, engine.describe()["num_cpu_blocks"]) == (2, 16)
    assert measure_host(alone, card) is None


@pytest.mark.parametrize("place", [settings(), with_host()], ids=["alone", "with a host"])
def test_tokens_that_are_drawn_on_the_device_are_the_same(tmp_path, monkeypatch, place):
    _, card = saved(tmp_path)
    sampled = [Sampling(0.0), Sampling(1.0, seed=1), Sampling(2.0, 20, 0.9, 2), Sampling(0.8, 0, 0.7, 3)]
    offers = [
        GenerationOffer(number, 60.0, np.arange(5 + 3 * number, dtype=np.int32), 12, asked, answers=2)
        for number, asked in enumerate(sampled)
    ]
    here = generate(create_step_engine(card, place, "cpu", 1), offers)
    for module in (device_sampling, causal_stages):
        monkeypatch.setattr(module, "logits_of", lambda _: TorchLogits)
    engine = create_step_engine(card, place, "cpu", 1)
    assert generate(engine, offers) == here
    one = Work([Chunk(np.zeros(3, np.int32), 0, [0])])
    assert isinstance(engine.steps.step(one).logits, TorchLogits)


def test_the_cache_fills_what_memory_is_left_and_says_where_it_is_too_small(tmp_path, monkeypatch):
    _, card = saved(tmp_path)
    weights = card.model.parameters * 4
    monkeypatch.setattr(MEMORY, lambda: weights + 40 * BLOCK_BYTES)
    assert create_step_engine(card, settings(blocks="auto"), "cpu", 1).blocks == 20
    monkeypatch.setattr(MEMORY, lambda: weights + 4 * BLOCK_BYTES)
    with pytest.raises(SettingsError, match=r"args\.cpu\.blocks: .* 256 tokens"):
        create_step_engine(card, settings(blocks="auto"), "cpu", 1)


@pytest.mark.parametrize(("each", "free", "blocks"), [(1, 800, 680), (2, 800, 425), (2, 400, 340)])
def test_replicas_that_share_a_device_divide_its_memory(each, free, blocks):
    """Whether the other replicas have loaded yet or not."""
    torch = SimpleNamespace(cuda=SimpleNamespace(mem_get_info=lambda: (free, 1000)))
    settings = GenerationAcceleratorSettings(replicas_per_device=each)
    assert _room(torch, SimpleNamespace(type="cuda"), settings, 0, 1) == blocks


def test_blocks_for_which_the_host_has_no_memory_are_refused(tmp_path, monkeypatch):
    _, card = saved(tmp_path)
    weights = card.model.parameters * 4
    monkeypatch.setattr(MEMORY, lambda: weights + (6 + 16) * BLOCK_BYTES)  # a CPU's own cache lies there, too
    assert create_step_engine(card, with_host(), "cpu", 1).num_cpu_blocks == 16
    with pytest.raises(SettingsError, match=r"args\.accelerator\.num_cpu_blocks: 17 blocks take .* has room for 16"):
        create_step_engine(card, with_host(num_cpu_blocks=17), "cpu", 1)


def test_a_model_that_cannot_generate_is_refused_by_name(tmp_path):
    _, card = saved(tmp_path, "mistral", sliding_window=64)
    with pytest.raises(SettingsError, match=r"args\.model\.id: mistral"):
        create_step_engine(card, settings(), "cpu", 1)


def test_a_device_that_is_emulated_by_its_name_has_its_host(tmp_path):
    _, card = saved(tmp_path)
    named = {"engine": "emulated", "emulated": {"device": "neo-t4-llama-2-7b", "beta_s": 0.001}}
    known = EMULATED_ACCELERATORS["neo-t4-llama-2-7b"]
    engine = create_step_engine(
        card, GenerationAcceleratorSettings.model_validate({**named, "num_cpu_blocks": 9}), "emulated", 1
    )
    assert (engine.blocks, engine.num_cpu_blocks, engine.model.beta_s) == (known.blocks, 9, 0.001)
    assert measure_host(engine, card) == known.host_time
    found = engine.steps.step(PlannedStep(cached=200, host_rows=2, copied=1).work(known.blocks, card, 9).work)
    assert found.logits.shape == (2, VOCABULARY)
    assert found.compute_s.host_s == pytest.approx(known.host_time.seconds(2, 402))
    alone = create_step_engine(card, GenerationAcceleratorSettings.model_validate(named), "emulated", 1)
    assert (alone.num_cpu_blocks, measure_host(alone, card)) == (0, None)


@pytest.mark.parametrize("device", ["cuda", "npu"])
@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_a_device_without_bfloat16_computes_in_float16(device, capability, dtype):
    """torch-npu says no for those before Ascend910B1: Ascend310P3, for example, and Ascend910A."""
    npu = SimpleNamespace(is_bf16_supported=lambda: capability == (8, 0))
    torch = SimpleNamespace(cuda=SimpleNamespace(get_device_capability=lambda _: capability), npu=npu)
    assert _quick_dtype(torch, SimpleNamespace(type=device))[0] == dtype
