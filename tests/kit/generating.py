"""A Router that generates without a model: the same tokens for the same request."""

import asyncio
import itertools
from pathlib import Path

import numpy as np

from deployments.generation.request import Piece
from deployments.generation.settings import GenerationSettings
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.model_card import GenerationCard
from deployments.generation.text.prompt_scores import PromptScores
from deployments.generation.text.sampling import Picked, Sampling
from deployments.models.model_files import ModelCard
from deployments.models.tokenizer_files import read_tokenizer
from tests.kit.fake_router import SPACE
from tests.kit.tiny_tokenizers import qwen

ANSWER = "The overflow goes to the CPU 🐟, says the Router. Then all are answered."
TEMPLATE = """{% if tools %}<|im_start|>system
Answer with <tool_call> to call one of {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def settings_of(**limits):
    """Settings of a server that is called tiny, with these limits."""
    limits = {"max_prompts": 3, "max_answers": 4, "default_tokens": 100, "max_body_bytes": 5000, **limits}
    return GenerationSettings.parse({"model": {"id": "tiny", "aliases": ["gpt-4o"]}, "limits": limits})


class Generating:
    """- `pace_s`: seconds between two tokens. `pauses`: {index of a token: seconds before it}.
    - `refuses`: raised by `begin`, after `refuses_after` successful calls.
    - `breaks`: (n, an error to raise after n tokens of an answer).
    - `tokens`: how many were computed so far; `at_token` is called at each.
    - `cached`: tokens of each prompt that a replica's cache holds.
    - `says`: the text of each answer.
    - `open`: generations that have a slot. `asked`: all requests. `heard`: how often replicas' states were refreshed.
    """

    started, space = 5.0, SPACE

    def __init__(self, folder: Path, *, context=400, template=TEMPLATE, temperature=0.7):
        if not (folder / "tokenizer.json").is_file():
            qwen(folder, auto_map={})
        self.tokenizer = read_tokenizer(folder)
        words = self.tokenizer.get_vocab_size()
        model = ModelCard("tiny", folder, None, "qwen2", 8, words, context, "last", False, False, False, 1, 1)
        self.card = GenerationCard(
            model, (self.tokenizer.token_to_id("<|im_end|>"),), Sampling(temperature), template, {}
        )
        self.reset()

    def reset(self):
        self.live_pools = {"accelerator": True, "cpu": True}
        self.pace_s, self.pauses, self.breaks = 0.0, {}, None
        self.refuses, self.refuses_after, self.cached = None, 0, 0
        self.says = ANSWER
        self.open, self.asked, self.tokens, self.at_token, self.heard = 0, [], 0, lambda: None, 0

    @property
    def load(self):
        return self.open

    async def hear_replicas(self):
        self.heard += 1

    def describe(self):
        return {"open": self.open}

    async def begin(self, asked):
        if self.refuses is not None and self.open >= self.refuses_after:
            raise self.refuses
        self.asked.append(asked)
        asked.record.cached_tokens = self.cached
        self.open += 1
        return _Begun(self, asked)

    def answer(self, number, asked):
        """The tokens of an answer, the end token last, if it comes so far."""
        ids = self.tokenizer.encode(f"{number}: {self.says}" if asked.answers > 1 else self.says).ids
        end = [] if asked.ignore_end else [*self.card.end_tokens]
        whole = (
            [*ids, *end] if not asked.ignore_end else list(itertools.islice(itertools.cycle(ids), asked.most_tokens))
        )
        return whole[: asked.most_tokens]

    async def pieces(self, asked):
        texts = [Detokenizer(self.tokenizer, asked.stops) for _ in range(asked.answers)]
        answers = [self.answer(number, asked) for number in range(asked.answers)]
        left = set(range(asked.answers))
        for place in range(asked.most_tokens):
            for number in sorted(left):
                await asyncio.sleep(self.pauses.get(place, self.pace_s))
                if self.breaks is not None and place == self.breaks[0]:
                    raise self.breaks[1]
                token = answers[number][place]
                self.tokens += 1
                self.at_token()
                ends = token in self.card.end_tokens
                text = "" if ends else texts[number].add(token)
                stopped = ends or texts[number].stopped
                finish = "stop" if stopped else "length" if place + 1 == asked.most_tokens else None
                if finish and not texts[number].stopped:
                    text += texts[number].end()
                if finish:
                    left.discard(number)
                yield Piece(number, text, (self.picked(token, asked),), finish, self.scores(asked))

    def picked(self, token, asked):
        if asked.logprobs is None:
            return Picked(token)
        others = tuple(((token + number) % 300, -0.5 - number) for number in range(asked.logprobs))
        return Picked(token, -0.5, others)

    def scores(self, asked):
        """Of a prompt's tokens: each has -1, and alternatives as `picked`, so it is the second likeliest."""
        if asked.prompt_logprobs is None:
            return None
        tokens, others = len(asked.ids) - 1, np.arange(asked.prompt_logprobs)
        ids = np.concatenate([asked.ids[1:, None], (asked.ids[1:, None] + 1 + others) % 300], 1)
        logprobs = np.tile(np.concatenate([[-1.0], -0.5 - others]), (tokens, 1))
        return PromptScores(ids.astype(np.int32), logprobs.astype(np.float32), np.full(tokens, 2, np.int32))


class _Begun:
    """Frees its slot when it is closed, even before its first piece."""

    def __init__(self, world, asked):
        self.world, self.closed = world, False
        self.inner = world.pieces(asked)

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return await anext(self.inner)
        except BaseException:
            self._free()
            raise

    async def aclose(self):
        self._free()
        await self.inner.aclose()

    async def athrow(self, error):
        self._free()
        raise error

    def _free(self):
        if not self.closed:
            self.closed = True
            self.world.open -= 1
