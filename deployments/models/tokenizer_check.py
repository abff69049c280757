"""Takes the model's own tokenizer from transformers, before the first query, and checks that it fits the model.

A raw tokenizer.json is not always the model's tokenizer, because the model's class in transformers may build another
one, with other tokens around a text or in odd cases. If the two make other tokens of plain words, one of them belongs
to another model, and nothing is served.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from deployments.errors import SettingsError
from deployments.models.disk_cache import KeptFile, state_of_files
from deployments.models.model_files import SCORING, ModelCard
from deployments.models.model_folder import bad_model
from deployments.models.reference_tokenizer import Ask, OwnTokenizer, Question, ask
from deployments.models.tokenizer_files import add_ends, read_tokenizer

logger = logging.getLogger("ray.serve")

_VOCABULARIES = ("vocab.*", "*.model", "tekken.json")  # what transformers reads without a tokenizer.json
_SPECIAL_TOKENS = 12  # how many of the tokenizer's own special tokens are tried

# Fixed texts on which two tokenizers are compared: many scripts, and cases in which tokenizers often differ.
ENGLISH = "The accelerator answers first; the CPU's overflow wasn't late (3,141 queries/s)."
PLAIN = {
    "English": ENGLISH,
    "German": "Größere Übermäßigkeit: ein Überlauf für 7 Straßen.",
    "French": "L'été où déjà ça a coûté 12,50 € à Noël, naïvement.",
    "Vietnamese": "Tiếng Việt có nhiều dấu thanh.",
    "Turkish": "İstanbul'da ılık bir akşam.",
    "Russian": "Очередь переполнена, попробуйте позже.",
    "Greek": "Η ουρά είναι γεμάτη, δοκιμάστε αργότερα.",
    "Chinese": "加速器先回答，溢出的请求交给CPU处理。",
    "Japanese": "アクセラレータが先に答え、あふれた分はCPUが処理する。",
    "Korean": "가속기가 먼저 응답하고 넘치는 요청은 CPU가 처리한다.",
    "Arabic": "المسرّع يجيب أولاً ثم المعالج.",
    "Hebrew": "המאיץ עונה ראשון.",
    "Hindi": "त्वरक पहले उत्तर देता है।",
    "Thai": "ตัวเร่งตอบก่อนแล้วจึงเป็นซีพียู",
    "code": "def f(x: int) -> list[str]: return [f'{x:>04}_{i}' for i in range(10**6)]",
    "a link": "see https://example.org/a-b_c?d=e%20f#g or mail to a.b+c@example.org",
    "digits": "0 12 345 6789 1234567890 3.14159e-10 ½ Ⅷ",
    "emoji": "good 👍🏽 family 👨‍👩‍👧 flag 🇩🇪",
    "one letter": "a",
    "a long text": " ".join([ENGLISH] * 30),
}
ODD = {
    "full-width letters": "ＡＢＣ ﬁnd ① ™",
    "loose accents": "e\u0301te\u0301 o\u0308ffnen",
    "a blank before it": " hello",
    "blanks after it": "hello  ",
    "blanks inside it": "a  b   c",
    "lines and tabs": "a\nb\r\n\tc\n\n\nd",
    "blanks alone": "   ",
    "invisible characters": "a\u200bb\u00a0c\ufeffd\x00e\u2028f",
    "names of special tokens": "x [CLS] y [SEP][MASK] z <s> a </s> <mask> <pad> <unk> <bos><eos> <|endoftext|> b",
}
PAIRS = {
    "an English pair": (ENGLISH, "It goes to the CPU."),
    "a Chinese pair": (PLAIN["Chinese"], "去哪里？"),
    "a pair of blanks": (" ", "a "),
}


def ask_once(question: Question, ask: Ask = ask) -> OwnTokenizer | str:
    """`ask` with a cache on disk, so that a restarted Router need not ask again, which takes more than a second.

    Answers of a model's own code are not cached, because it may read more than the model's files.
    """
    if question.trust_remote_code:
        return ask(question)
    libraries = [version("transformers"), version("tokenizers"), sys.version]
    kept = KeptFile("tokenizers", [asdict(question), state_of_files(Path(question.folder)), libraries])
    with contextlib.suppress(TypeError):  # nothing stored, or another format
        return OwnTokenizer(**kept.read())
    answer = ask(question)
    if isinstance(answer, OwnTokenizer):
        with contextlib.suppress(OSError):
            kept.write(asdict(answer))
    return answer


def checked_tokenizer(card: ModelCard, wanted: str = "auto", ask: Ask = ask) -> FastTokenizer:
    """The tokenizer that produces the model's own tokens. `wanted`: the setting `args.model.tokenizer`; "auto" and
    "transformers" take what transformers builds, "auto" only if tokenizer.json has the same words; "file" takes
    tokenizer.json unchecked.

    Raises SettingsError if the tokens would not be the model's, or if no tokenizer can be built.
    """
    here = read_tokenizer(card.folder)
    if here is None and (wanted == "file" or not any(any(card.folder.glob(name)) for name in _VOCABULARIES)):
        older = "" if wanted == "file" else " and no older vocabulary"
        raise SettingsError("args.model.tokenizer", f"{card.folder} holds no tokenizer.json{older}")
    texts = _texts(card, here)
    if wanted == "file" and here is not None:
        chosen = here
    else:
        chosen = _own(card, here if wanted == "auto" else None, texts, ask)
        if added := add_ends(chosen, card.folder, known=here):
            logger.info("%s is put around each text, as tokenizer_config.json says", " and ".join(added))
    _check_vocabulary(card, chosen, texts, whole=here is None)
    return chosen


def _own(card: ModelCard, here: FastTokenizer | None, texts: Mapping[str, str], ask: Ask) -> FastTokenizer:
    """The tokenizer of transformers, or `here` if that cannot be built."""
    pairs = PAIRS.values() if card.kind in SCORING and card.judge is None else ()
    own = ask(Question(str(card.folder), card.trust_remote_code, [*((text,) for text in texts.values()), *pairs]))
    if isinstance(own, str):
        return _unchecked(card, here, own)
    if own.backend is None:
        problem = f"{own.name} of transformers is no fast tokenizer, which alone is served; file takes tokenizer.json"
        raise SettingsError("args.model.tokenizer", problem)
    fast = FastTokenizer.from_str(own.backend)
    if here is not None:
        _compare_words(here, fast)
    return fast


def _compare_words(here: FastTokenizer, theirs: FastTokenizer) -> None:
    """Raises SettingsError for the first plain text whose tokens differ, without the tokens around it."""
    for name, text in PLAIN.items():
        ids = [fast.encode(text, add_special_tokens=False).ids for fast in (here, theirs)]
        for place, (ours, own) in enumerate(itertools.zip_longest(*ids, fillvalue="nothing"), 1):
            if ours != own:
                raise SettingsError(
                    "args.model.tokenizer",
                    f"token {place} of {name} is {ours} by tokenizer.json and {own} by transformers: one of the two is "
                    "not this model's: set it to file (tokenizer.json as it is) or transformers, whichever the model "
                    "was trained with",
                )


def _unchecked(card: ModelCard, here: FastTokenizer | None, problem: str) -> FastTokenizer:
    """tokenizer.json's tokenizer, unchecked. Raises SettingsError without one."""
    if here is None:
        if any(card.folder.glob("*.model")) and importlib.util.find_spec("sentencepiece") is None:
            problem = "its vocabulary needs the package sentencepiece (pip install windve[sentencepiece])"
        raise bad_model(f"transformers cannot build the tokenizer of {card.folder}: {problem}")
    logger.warning("tokenizer.json is used unchecked: transformers cannot build the model's tokenizer: %s", problem)
    return here


def _texts(card: ModelCard, here: FastTokenizer | None) -> dict[str, str]:
    """The texts to try, by name: fixed texts, the tokenizer's own special tokens, and the model's prompts."""
    special = [] if here is None else [token.content for token in here.get_added_tokens_decoder().values()]
    texts = {
        **PLAIN,
        **ODD,
        "names of its own special tokens": " x ".join(special[:_SPECIAL_TOKENS]) or "x",
        **{f"a text with the prompt {name}": prompt + ENGLISH for name, prompt in card.prompts.items()},
    }
    if card.judge is not None:
        texts["the reranker's prompt"] = card.judge.before + " ".join((*card.judge.texts, *card.judge.after))
    return texts


def _check_vocabulary(card: ModelCard, fast: FastTokenizer, texts: Mapping[str, str], *, whole: bool) -> None:
    """Raises SettingsError if the tokenizer does not fit the model's vocabulary. `whole`: also check that the
    vocabulary is complete, because transformers builds a tokenizer even if it does not find the files.
    """
    if whole and 2 * fast.get_vocab_size() < card.vocab_size:
        raise bad_model(
            f"transformers finds {fast.get_vocab_size()} of the model's {card.vocab_size} tokens in {card.folder}"
        )
    for name, encoding in zip(texts, fast.encode_batch([*texts.values()]), strict=True):
        if (largest := max(encoding.ids, default=0)) >= card.vocab_size:
            raise bad_model(
                f"the tokenizer is not this model's: {name} has token {largest}, and the model knows {card.vocab_size}"
            )
