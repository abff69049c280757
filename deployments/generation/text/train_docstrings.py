"""Trains a small language model on the documentation that every Python carries: docstrings, and the reference behind
`help()`. It writes like them and knows nothing.

Run as a script, in a process that does nothing else and ends, so that who wants the model loads no torch. It imports
nothing of ours, reads a recipe as JSON from stdin, and writes one line of JSON to stdout for each step.

So short a training needs a good start. The model begins as a bigram model: what follows a token, by counts, factorised
into the embeddings and the head (as Levy and Goldberg, 2014, say what word vectors are: factors of pointwise mutual
information). All layers add nothing at first, and learn what the token before does not tell.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_END, _TURN, _TURN_ENDS = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data"}
_SHORTEST = 20  # characters of a docstring that says something
_HEAD_SIZE = 64
_CONTEXT = 2048
_HELD_OUT = 30  # one text in so many is not learned from, and tells what the model has learned
_PRIOR = 5.0  # of a bigram's counts: so many tokens are thought to have followed by chance
_WARM_UP = 30  # steps


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the model is, and how long it learns: `steps` of `batch` pieces of `length` tokens, of the first
    `characters` characters of the documentation. `hidden` is a multiple of 64. The same makes the same model on the
    same machine.
    """

    vocabulary: int = 4096
    hidden: int = 192
    layers: int = 3
    steps: int = 350
    batch: int = 8
    length: int = 128
    characters: int = 10_000_000
    rate: float = 4e-3
    seed: int = 0


def documentation() -> Iterator[tuple[str, str]]:
    """(name, text) of each thing that Python's own library documents."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(inside.parts):
            yield from _docstrings(path, ".".join(inside.with_suffix("").parts).removesuffix(".__init__"))
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some systems leave it out
        return
    yield from sorted(topics.items())


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    documented: list[tuple[Any, str]] = [(tree, module)]
    for node, name in documented:  # it grows
        text = ast.get_docstring(node)
        if text and len(text) >= _SHORTEST:
            yield name, text
        within = (each for each in node.body if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
        documented += [(each, f"{name}.{each.name}") for each in within]


def texts(recipe: Recipe) -> list[str]:
    """In an order drawn by the seed; every second one is the answer to a question, as the chat template writes it."""
    found: list[tuple[str, str]] = []
    left = recipe.characters
    for name, text in documentation():
        if left <= 0:
            break
        found.append((name, text[:left]))
        left -= len(text)
    random.Random(recipe.seed).shuffle(found)  # noqa: S311 - nothing secret
    return [
        f"{_TURN}user\nWhat is {name}?{_TURN_ENDS}\n{_TURN}assistant\n{text}{_TURN_ENDS}\n{_END}"
        if number % 2
        else f"{text}{_END}"
        for number, (name, text) in enumerate(found)
    ]


def make_tokenizer(written: Sequence[str], recipe: Recipe) -> Any:
    """A byte-level BPE tokenizer: any text becomes tokens, and comes back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (text.replace(_TURN, "").replace(_TURN_ENDS, "").replace(_END, "") for text in written)
    tokenizer.train_from_iterator(plain, trainer)
    return tokenizer


def make_model(recipe: Recipe, learned: Any) -> Any:
    """A model that says what follows each token as the tokens `learned`, int64 [tokens], do."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = recipe.hidden // _HEAD_SIZE
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=recipe.vocabulary,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.hidden * 8 // 3,
            num_hidden_layers=recipe.layers,
            num_attention_heads=heads,
            num_key_value_heads=1,
            head_dim=_HEAD_SIZE,
            max_position_embeddings=_CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=[0, 2],
            pad_token_id=None,
        )
    )
    embeddings, head = _bigrams(learned, recipe)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(head)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def _bigrams(learned: Any, recipe: Recipe) -> tuple[Any, Any]:
    """(embeddings, head), float32 [vocabulary, hidden]: head times normed embedding is nearly log P(next | token).

    Two of the hidden numbers are kept for what the factors lack: one makes all embeddings of one length, so that the
    norm before the head changes none, and one is the same for all and carries log P(next).
    """
    import torch

    size, rank = recipe.vocabulary, recipe.hidden - 2
    counts = torch.bincount(learned[:-1] * size + learned[1:], minlength=size * size).float().view(size, size)
    before, after = counts.sum(1, keepdim=True), counts.sum(0) + 0.5
    chance = after / after.sum()
    information = torch.log((counts + _PRIOR * chance) / (before + _PRIOR)) - torch.log(chance)
    rows, columns = (before / before.sum() + 1e-6).sqrt(), chance.sqrt()  # frequent ones must fit best
    left, weights, right = torch.svd_lowrank(rows * information * columns, q=rank, niter=2)
    left, right = left * weights.sqrt() / rows, right * weights.sqrt() / columns[:, None]
    lengths = left.norm(dim=1, keepdim=True)
    left = left * (lengths.quantile(0.95) / lengths).clamp(max=1)  # rare tokens' are long, and noise
    longest = float(left.norm(dim=1).max()) * 1.05
    fill = (longest**2 - left.square().sum(1, keepdim=True)).sqrt()
    same = torch.full((size, 1), longest / 2)
    normed = recipe.hidden**0.5 / (longest**2 * 1.25) ** 0.5  # what the norm makes of a length of 1
    head = torch.cat([right / normed, torch.zeros(size, 1), torch.log(chance)[:, None] / (same * normed)], 1)
    return torch.cat([left, fill, same], 1) * normed / 2, head


def train(model: Any, learned: Any, recipe: Recipe) -> Iterator[float]:
    """The loss of each step, in nats a token."""
    import torch

    adam = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(recipe.seed)
    for step in range(recipe.steps):
        share = min(1.0, (step + 1) / _WARM_UP) * (1 - step / recipe.steps)
        for group in adam.param_groups:
            group["lr"] = recipe.rate * share
        starts = torch.randint(len(learned) - recipe.length, (recipe.batch,), generator=generator)
        loss = loss_of(model, torch.stack([learned[start : start + recipe.length + 1] for start in starts]))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        yield float(loss.detach())


def loss_of(model: Any, pieces: Any) -> Any:
    """Of each next token, in nats. `pieces`: int64 [pieces, tokens]."""
    from torch.nn import functional

    logits = model(input_ids=pieces[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """As a model's folder from a hub has it, in bfloat16."""
    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": _CONTEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": _TURN_ENDS,
        "pad_token": _END,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    ends = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))


def _main() -> None:
    import torch

    asked = json.load(sys.stdin)
    folder, recipe = Path(asked.pop("folder")), Recipe(**asked)
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)  # the same sums on any number of cores, and no waiting for one that is busy
    written = texts(recipe)
    tokenizer = make_tokenizer(written, recipe)
    ids = [torch.tensor(found.ids) for found in tokenizer.encode_batch(written)]
    learned, held = (torch.cat(part) for part in (ids[len(ids) // _HELD_OUT :], ids[: len(ids) // _HELD_OUT]))
    model = make_model(recipe, learned)
    for step, loss in enumerate(train(model, learned, recipe), 1):
        print(json.dumps({"step": step, "loss": loss}), flush=True)
    pieces = held[: len(held) // recipe.length * recipe.length].view(-1, recipe.length)[:64]
    with torch.inference_mode():
        unseen = float(loss_of(model.eval(), pieces))
    save(folder, model, tokenizer)
    print(json.dumps({"unseen": unseen, "parameters": sum(each.numel() for each in model.parameters())}), flush=True)


if __name__ == "__main__":
    _main()
