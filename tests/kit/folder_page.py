"""Writes docs/model-files.md: how windve handles each key of a model's folder. `python -m tests.kit.folder_page`."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from deployments.models.folder_keys import (
    COMPARED,
    MODULES,
    OF_SCORES,
    PADDING,
    REFUSED,
    SENTENCE,
    THEIR_LIBRARY,
    TRANSFORMER,
    TRANSFORMER_CONFIGS,
    Keys,
    words,
)

PAGE = Path(__file__).parents[2] / "docs" / "model-files.md"
HEAD = """\
# Model files

Find a key of your model's files here: windve supports it, ignores it because it cannot change the answer, or refuses
the model. These are all that sentence-transformers 6 and transformers 5 read. For what is served see
[Models](models.md). `python -m tests.kit.folder_page` writes this page from the tables that windve
itself obeys (`deployments/models/folder_keys.py`) and its own, of keys that windve reads one by one. A test compares
them with the installed libraries.

- **Supported**: means the same as in the library that reads it.
- **No effect**: the vectors or scores are the same with any value. The reason is below.
- **Refused**: windve does not start, and names the key. Null is accepted, and so is the value after `=`: it asks for
  what windve does anyway. A key that is not in the table is refused too. In files with a star it is ignored, as in the
  libraries, or belongs to the model's class ([Models](models.md#families)).

`model_kwargs`, `processor_kwargs` and `config_kwargs` may have their older names: `model_args`, `tokenizer_args` and
`config_args`.
"""
TRANSFORMER_FILE = "sentence_bert_config.json"
DONE = "done"
MODULE_LIST = Keys(
    words("type path"),
    unused={"idx": "the list has an order", "name": "a name", "kwargs": "arguments of calls that no route has"},
    is_open=True,
)
TOKENIZER = Keys(
    words(
        "model_max_length max_len truncation_side model_input_names add_bos_token add_eos_token mask_token cls_token "
        "eos_token bos_token pad_token unk_token sep_token"
    ),
    unused={
        **dict.fromkeys(
            words(
                "tokenizer_class auto_map backend added_tokens_decoder additional_special_tokens extra_special_tokens "
                "model_specific_special_tokens split_special_tokens add_prefix_space"
            ),
            COMPARED,
        ),
        "padding_side": PADDING,
        **dict.fromkeys(
            words(
                "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
            ),
            "acts when tokens become text",
        ),
        **dict.fromkeys(
            words("chat_template response_template response_schema chat_control_tokens"),
            "texts are no chats; a reranker's prompt is `args.model.template`",
        ),
        **dict.fromkeys(words("name_or_path processor_class verbose files_loaded"), THEIR_LIBRARY),
    },
    is_open=True,
)
CONFIG = Keys(  # what any model's has; those of a family: `config_adapters` and `engines.packed.families`
    words("architectures model_type id2label num_labels is_causal is_encoder_decoder auto_map text_config"),
    refused={"quantization_config": ()},
    unused={
        "label2id": "id2label says the same",
        "problem_type": OF_SCORES,
        "sentence_transformers": OF_SCORES,
        "dtype": "`dtype` of the pool decides",
        "torch_dtype": "`dtype` of the pool decides",
        "transformers_version": THEIR_LIBRARY,
        **dict.fromkeys(words("output_hidden_states return_dict chunk_size_feed_forward"), "the same vectors"),
    },
    is_open=True,
)
STANFORD = Keys(
    words("query_maxlen doc_maxlen query_token_id doc_token_id mask_punctuation attend_to_mask_tokens"), is_open=True
)

_WEIGHTS = "pytorch_model.bin pytorch_model.bin.index.json model.safetensors model.safetensors.index.json"
_NO_TEXT = "only texts are read"
# The files that the libraries look for. A file with a table of keys is "done" as far as the table says.
FILES: Mapping[str, str | Keys] = {
    "modules.json": MODULE_LIST,
    "config_sentence_transformers.json": SENTENCE,
    "sentence_bert_config.json": TRANSFORMER,
    **dict.fromkeys(TRANSFORMER_CONFIGS[1:], DONE),
    "config.json": CONFIG,
    "tokenizer_config.json": TOKENIZER,
    "artifact.metadata": STANFORD,
    **dict.fromkeys(words(_WEIGHTS), DONE),
    "tokenizer.json": DONE,
    **dict.fromkeys(("special_tokens_map.json", "added_tokens.json", "vocab.txt"), COMPARED),
    **dict.fromkeys(("chat_template.jinja", "chat_template.json"), TOKENIZER.unused["chat_template"]),
    "adapter_config.json": "refused: an adapter is merged with its model first",
    **dict.fromkeys(("adapter_model.bin", "adapter_model.safetensors"), "refused with adapter_config.json"),
    **dict.fromkeys(("preprocessor_config.json", "video_preprocessor_config.json"), _NO_TEXT),
    **dict.fromkeys(("processor_config.json", "audio_tokenizer_config.json"), _NO_TEXT),
    "generation_config.json": "read only by models that generate",
    **dict.fromkeys(("README.md", "modelcard.json"), "for people"),
    **dict.fromkeys(
        ("router_config.json", "lstm_config.json", "cnn_config.json", "wordembedding_config.json", "idf.json"),
        "refused with its module",
    ),
    **dict.fromkeys(
        ("whitespacetokenizer_config.json", "phrasetokenizer_config.json"), "refused with the module WordEmbeddings"
    ),
}


def page():
    """The whole page."""
    keys = {name + " *" * how.is_open: how for name, how in FILES.items() if isinstance(how, Keys)}
    modules = {f"{name}: config.json": how for name, how in MODULES.items() if how is not FILES[TRANSFORMER_FILE]}
    reasons = defaultdict(list)
    sections = [HEAD, "\n## Keys\n\n", _row("file", "supported", "no effect", "refused"), "|---|---|---|---|\n"]
    for place, how in (keys | modules).items():
        for key, why in sorted(how.unused.items()):
            reasons[why].append(key)
        refused = [key + "".join(f" = {json.dumps(value)}" for value in same) for key, same in how.refused.items()]
        sections.append(_row(place, *map(_listed, (sorted(how.done), sorted(how.unused), refused))))
    sections += ["\n## Why keys have no effect\n\n", _row("keys", "reason"), "|---|---|\n"]
    sections += [_row(_listed(dict.fromkeys(some)), why) for why, some in sorted(reasons.items())]
    sections += ["\n## Files\n\n", _row("file", "handling"), "|---|---|\n"]
    files = defaultdict(list)
    for name, how in FILES.items():
        files["by its keys, above" if isinstance(how, Keys) else "read" if how == DONE else how].append(name)
    sections += [_row(_listed(sorted(names)), how) for how, names in files.items()]
    sections += ["\n## Modules that are refused\n\n", _row("module", "reason"), "|---|---|\n"]
    others = defaultdict(list)
    for name, why in REFUSED.items():
        others[why or "not implemented"].append(name)
    return "".join([*sections, *(_row(_listed(names), why) for why, names in others.items())])


def _listed(names):
    older = ("model_args.", "tokenizer_args.", "config_args.")
    return ", ".join(f"`{name}`" for name in names if not name.startswith(older)) or "-"


def _row(*cells):
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
