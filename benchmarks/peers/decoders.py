"""`python -m benchmarks.peers.decoders LIBRARY FOLDER DTYPE` generates greedily with one library, in its own
environment.

FOLDER has a causal model's config and weights, in DTYPE. Each line on stdin is JSON with `prompts` ([answers, tokens])
and `answer` (tokens). Each line on stdout is JSON with the seconds taken and the tokens ([answers, `answer`]).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answers = list[list[int]]
Decoder = Callable[[Answers, int], Answers]  # (prompts, tokens of an answer) -> answers

_STEP_TOKENS = 2048  # most prompt tokens in a step, if the library has such an option


def windve(folder: Path, dtype: str) -> Decoder:
    """The steps of windve as in a replica, without what a service adds: admission, sampling, text."""
    import numpy as np
    import torch
    from transformers import AutoConfig

    from deployments.engines.packed.tensors import Place, Weights
    from deployments.generation.engine.causal_model import CausalModel
    from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
    from deployments.generation.scheduler.work import Chunk

    place, blocks = Place(torch.device("cpu"), getattr(torch, dtype)), 160
    model = CausalModel(AutoConfig.from_pretrained(folder), Weights.of_files(folder, place), blocks)

    def decode(prompts: Answers, answer: int) -> Answers:
        each = blocks_of(len(prompts[0]) + answer, BLOCK)
        tables = [range(row * each, (row + 1) * each) for row in range(len(prompts))]

        def step(rows: range, ids: Answers, start: int) -> list[int]:
            chunks = [Chunk(np.array(ids[row], np.int32), start, tables[row]) for row in rows]
            picked: list[int] = model.step(chunks).numpy().argmax(-1).tolist()
            return picked

        found: Answers = []
        most = max(1, _STEP_TOKENS // len(prompts[0]))  # whole prompts in a step, or parts of one
        for row in range(0, len(prompts), most):
            rows = range(row, min(row + most, len(prompts)))
            for start in range(0, len(prompts[0]), _STEP_TOKENS):
                picked = step(rows, [prompt[start : start + _STEP_TOKENS] for prompt in prompts], start)
            found += [[token] for token in picked]
        for place in range(answer - 1):
            last = [tokens[-1:] for tokens in found]
            for tokens, token in zip(found, step(range(len(found)), last, len(prompts[0]) + place), strict=True):
                tokens.append(token)
        return found

    return decode


def _transformers(folder: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def generate(folder: Path, dtype: str) -> Decoder:
    """Static batches of transformers."""
    import torch

    model = _transformers(folder, dtype)

    def decode(prompts: Answers, answer: int) -> Answers:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer, do_sample=False)
        tokens: Answers = found[:, ids.shape[1] :].tolist()
        return tokens

    return decode


def generate_batch(folder: Path, dtype: str) -> Decoder:
    """Continuous batching of transformers."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _transformers(folder, dtype)
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=_STEP_TOKENS, allow_block_sharing=False)

    def decode(prompts: Answers, answer: int) -> Answers:
        kept = {"max_new_tokens": answer, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        wanted = GenerationConfig(**kept)  # type: ignore[no-untyped-call]
        found = model.generate_batch(prompts, generation_config=wanted, continuous_batching_config=batching)
        return [one.generated_tokens for one in found.values()]

    return decode


def openvino(folder: Path, dtype: str) -> Decoder:
    """openvino-genai's continuous batching, with the model exported by optimum-intel."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai
    from optimum.intel import OVModelForCausalLM

    written = folder / "openvino"
    if not (written / "openvino_model.xml").exists():
        OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False).save_pretrained(
            written
        )
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_batched_tokens = 1, _STEP_TOKENS  # GB
    scheduling.enable_prefix_caching = False
    short = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    pipeline = genai.ContinuousBatchingPipeline(
        written, scheduling, "CPU", {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
    )

    def decode(prompts: Answers, answer: int) -> Answers:
        wanted = genai.GenerationConfig(max_new_tokens=answer, ignore_eos=True, do_sample=False, eos_token_id=0)
        ids = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        found = pipeline.generate(ids, [wanted] * len(ids))
        return [list(one.m_generation_ids[0]) for one in found]

    return decode


def vllm(folder: Path, dtype: str) -> Decoder:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=8448,
        max_num_seqs=40,
        max_num_batched_tokens=_STEP_TOKENS,
        enable_prefix_caching=False,
    )

    def decode(prompts: Answers, answer: int) -> Answers:
        wanted = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        found = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return decode


def llama_cpp(folder: Path, dtype: str) -> Decoder:
    """llama.cpp, its weights written anew as GGUF."""
    from benchmarks.peers.llama_cpp_decoder import LlamaCpp

    return LlamaCpp(folder, dtype, len(os.sched_getaffinity(0)))


DECODERS = {made.__name__: made for made in (windve, generate, generate_batch, openvino, vllm, llama_cpp)}


def main(library: str, folder: str, dtype: str) -> None:
    """Only result lines go to stdout; what the libraries print goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out, contextlib.redirect_stdout(sys.stderr):
        os.dup2(2, 1)
        decode = DECODERS[library](Path(folder), dtype)
        for line in sys.stdin:
            asked = json.loads(line)
            began = time.perf_counter()
            tokens = decode(asked["prompts"], asked["answer"])
            print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), file=out, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
