"""Small tokenizers of several families in the hub's formats, trained on the texts used for comparing tokenizers."""

import json

from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from deployments.models.tokenizer_check import ODD, PLAIN

TEXTS = [*PLAIN.values(), *ODD.values()]
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def write(folder, files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def llama(folder, *, add_eos_token, model_type="mistral", **config):
    """Like Mistral's and e5-mistral's: a normalizer puts a blank before a text, and no template adds an end token."""
    fast = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=[*special, *BYTES], show_progress=False)
    fast.train_from_iterator(TEXTS, trainer)
    raw = json.loads(fast.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in special]  # bytes are none
    fast = Tokenizer.from_str(json.dumps(raw))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    flags = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "add_eos_token": add_eos_token}
    files = {"tokenizer.json": fast.to_str(), "tokenizer_config.json": {**names, **flags, **config}}
    write(folder, {**files, "config.json": {"model_type": model_type}})


def qwen(folder, **config):
    """Like gte-Qwen2's: the model's own code adds the end token."""
    fast = Tokenizer(models.BPE())
    fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator(TEXTS, trainer)
    fast.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    code = {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]}
    files = {"tokenizer.json": fast.to_str(), "tokenizer_config.json": {**names, "auto_map": code, **config}}
    write(folder, {**files, "config.json": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}})


def bert_words(folder):
    """Like an old BERT's: a word list, and no tokenizer.json."""
    fast = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer, fast.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    fast.train_from_iterator(
        TEXTS, trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    words = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    files = {"vocab.txt": "".join(f"{word}\n" for word, _ in words), "config.json": {"model_type": "bert"}}
    write(folder, {**files, "tokenizer_config.json": {"do_lower_case": True}})


def roberta_words(folder):
    """Like an old RoBERTa's: vocab.json and merges.txt."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS, trainer)
    raw = json.loads(fast.to_str())["model"]
    merges = "".join(f"{' '.join(pair)}\n" for pair in raw["merges"])
    files = {"vocab.json": raw["vocab"], "merges.txt": f"#version: 0.2\n{merges}"}
    write(folder, {**files, "config.json": {"model_type": "roberta"}, "tokenizer_config.json": {}})


def xlm_roberta_words(folder):
    """Like an old XLM-R's: sentencepiece.bpe.model."""
    fast = Tokenizer(models.Unigram())
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    fast.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=700, special_tokens=special, unk_token="<unk>", show_progress=False)
    )
    proto = ModelProto()
    for piece, score in json.loads(fast.to_str())["model"]["vocab"]:
        kind = {"<unk>": 2, "<s>": 3, "</s>": 3}.get(piece, 1)
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = 1
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id, proto.trainer_spec.eos_id = 0, 1, 2
    write(folder, {"config.json": {"model_type": "xlm-roberta"}, "tokenizer_config.json": {}})
    (folder / "sentencepiece.bpe.model").write_bytes(proto.SerializeToString())
