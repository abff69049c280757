"""llama.cpp by llama-cpp-python's low-level API: all answers of a batch in one context, a sequence each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Answers = list[list[int]]

_STEP_TOKENS, _MOST_ANSWERS = 2048, 64
_CACHED = {"bfloat16": 30, "float32": 0}  # ggml_type, of which llama-cpp-python does not name bfloat16's
_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def write(folder: Path, dtype: str) -> Path:
    """Write a Qwen2 model in transformers' format as GGUF, without a vocabulary."""
    import gguf
    import numpy as np
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = gguf.GGUFWriter(folder / "model.gguf", "qwen2")
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_head_count_kv(config["num_key_value_heads"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    made.add_vocab_size(config["vocab_size"])
    made.add_tokenizer_model("none")
    narrow = gguf.GGMLQuantizationType.BF16
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            numbers = weights.get_tensor(name).float().numpy()
            if dtype == "bfloat16" and numbers.ndim > 1:
                made.add_tensor(_name(name), gguf.quantize(numbers, narrow), raw_dtype=narrow)
            else:
                made.add_tensor(_name(name), numbers.astype(np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return folder / "model.gguf"


def _name(name: str) -> str:
    """GGUF's name of a tensor."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_NAMES[rest]}"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


class LlamaCpp:
    """Generates greedily. The context is made anew when a batch needs a larger one."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import llama_cpp

        self._api, self._dtype, self._threads = llama_cpp, dtype, threads
        llama_cpp.llama_backend_init()
        path = str(write(folder, dtype)).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._room = 0

    def __call__(self, prompts: Answers, answer: int) -> Answers:
        self._make_room(len(prompts) * (len(prompts[0]) + answer))
        length = len(prompts[0])
        places = [(row, at) for row in range(len(prompts)) for at in range(length)]
        found: Answers = [[] for _ in prompts]
        for start in range(0, len(places), _STEP_TOKENS):
            some = places[start : start + _STEP_TOKENS]
            wanted = [at == length - 1 for _, at in some]
            self._step([(prompts[row][at], at, row) for row, at in some], wanted, found)
        for number in range(1, answer):
            rows = [(tokens[-1], length + number - 1, row) for row, tokens in enumerate(found)]
            self._step(rows, [True] * len(rows), found)
        return found

    def _make_room(self, tokens: int) -> None:
        api = self._api
        if tokens > self._room:
            if self._context is not None:
                api.llama_free(self._context)
            params = api.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = tokens, _STEP_TOKENS, _STEP_TOKENS
            params.n_seq_max, params.kv_unified = _MOST_ANSWERS, True
            params.n_threads = params.n_threads_batch = self._threads
            params.type_k = params.type_v = _CACHED[self._dtype]
            self._context, self._room = api.llama_init_from_model(self._model, params), tokens
        api.llama_memory_clear(api.llama_get_memory(self._context), True)

    def _step(self, tokens: list[tuple[int, int, int]], wanted: list[bool], found: Answers) -> None:
        """Compute `tokens` (token, place, row), and pick the next token of the rows that are `wanted`."""
        import numpy as np

        api, batch = self._api, self._api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for number, (token, place, row) in enumerate(tokens):
            batch.token[number], batch.pos[number] = token, place
            batch.n_seq_id[number], batch.seq_id[number][0] = 1, row
            batch.logits[number] = wanted[number]
        if api.llama_decode(self._context, batch) != 0:
            raise ValueError("llama_decode failed")
        for number, (_, _, row) in enumerate(tokens):
            if wanted[number]:
                logits = api.llama_get_logits_ith(self._context, number)
                found[row].append(int(np.ctypeslib.as_array(logits, (self._words,)).argmax()))
        api.llama_batch_free(batch)
