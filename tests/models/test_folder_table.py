"""The tables of `folder_keys` know every file and key that the installed libraries read, and no module is forgotten."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest

from deployments.models.folder_keys import LEGACY_POOLING, MODULES, REFUSED, SENTENCE, TRANSFORMER_CONFIGS
from tests.kit.folder_page import CONFIG, FILES, MODULE_LIST, STANFORD, TOKENIZER

st = pytest.importorskip("sentence_transformers", reason="no sentence-transformers to compare the tables with")
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder  # noqa: E402
from sentence_transformers.base.modules import Module  # noqa: E402
from sentence_transformers.base.modules.transformer import Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import pooling  # noqa: E402
from sentence_transformers.sparse_encoder.modules import SpladePooling  # noqa: E402
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, utils  # noqa: E402
from transformers import tokenization_utils_base as tokenization  # noqa: E402

LIBRARY = ["base", "sentence_transformer", "cross_encoder", "sparse_encoder", "multi_vector_encoder"]
ARGUMENTS = {  # of a module's class, that come from elsewhere than its config
    "Transformer": {"model_name_or_path", "backend"},
    "Dense": {"init_weight", "init_bias"},
}
A_FILE = re.compile(r"[\w-]+\.(json|bin|safetensors|metadata|jinja|model|txt)")


def known(keys):
    return keys.done | keys.refused.keys() | keys.unused.keys()


def modules():
    """sentence-transformers' modules, by name."""
    for one in pkgutil.walk_packages(st.__path__, "sentence_transformers."):
        if ".modules" in one.name:
            importlib.import_module(one.name)

    def below(kind):
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    found = {one.__name__: one for one in below(Module) if one.__module__.startswith("sentence_transformers.")}
    return {name: one for name, one in found.items() if not inspect.isabstract(one)}


def test_every_module_is_served_or_refused():
    assert modules().keys() - MODULES.keys() - REFUSED.keys() == set()
    assert MODULES.keys() <= modules().keys()


@pytest.mark.parametrize("name", MODULES)
def test_every_key_of_a_module_is_in_its_table(name):
    kind = modules()[name]
    arguments = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs", "_from_auto_load"}
    read = {*kind.config_keys, *kind.config_key_renames, *(arguments - ARGUMENTS.get(name, set()))}
    nested = {key.partition(".")[0] for key in known(MODULES[name])}  # what is not named inside is refused
    assert read - known(MODULES[name]) - nested == set()


def test_the_modes_of_pooling():
    assert pooling._LEGACY_POOLING_MODE_KWARGS == LEGACY_POOLING
    assert set(pooling.Pooling.POOLING_MODES) == set(LEGACY_POOLING.values())
    assert set(SpladePooling.SPLADE_POOLING_MODES) == {"sum", "max"}
    assert set(SpladePooling.SPLADE_ACTIVATION) == {"relu", "log1p_relu"}


def test_the_transformers_arguments():
    """Those that its config may hold, under old and new names, and the names of its file."""
    source = inspect.getsource(Transformer._load_init_kwargs) + inspect.getsource(Transformer.load_config)
    names = set(re.findall(r'"(\w+_(?:args|kwargs))"', source))
    assert names <= {key.partition(".")[0] for key in known(MODULES["Transformer"])}
    assert tuple(re.findall(r'"(sentence_[\w-]+_config\.json)"', source)) == TRANSFORMER_CONFIGS
    assert {"common", "text", "audio", "image", "video", "chat_template"} == Transformer._VALID_PROCESSING_KWARGS_KEYS


def words_in(function):
    """The strings in a function that may be keys."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))
        if hasattr(node, "value")
    )
    return {
        text for text in texts if isinstance(text, str) and re.fullmatch(r"[a-z]+(_[a-z]+)+|prompts|__version__", text)
    }


@pytest.mark.parametrize("kind", [SentenceTransformer, CrossEncoder, SparseEncoder, MultiVectorEncoder])
def test_every_key_of_a_model_is_in_its_table(kind):
    owners = [owner for owner in kind.__mro__ if "_parse_model_config" in vars(owner)]
    read = set().union(*(words_in(vars(owner)["_parse_model_config"]) for owner in owners))
    read |= set().union(*(words_in(vars(owner)["_get_model_config"]) for owner in owners))
    assert read - known(SENTENCE) - {"sentence_transformers"} == set()  # in __version__
    assert {"prompts", "default_prompt_name", "model_type"} <= read


def test_every_key_of_the_modules_list_is_in_its_table():
    source = inspect.getsource(SentenceTransformer._load_config_modules)
    for name, keys in (("module_config", MODULE_LIST), ("model_config", SENTENCE)):
        read = set(re.findall(rf'{name}(?:\.get\(|\[)"(\w+)"', source))
        assert read
        assert read - known(keys) == set()


def test_every_key_of_stanfords_file_is_in_its_table():
    source = inspect.getsource(MultiVectorEncoder)
    assert set(re.findall(r'metadata(?:\.get\(|\[)"(\w+)"', source)) == known(STANFORD)


def test_every_file_of_sentence_transformers_is_in_the_table():
    """All names of files in the code that loads models."""
    named = set()
    for part in LIBRARY:
        for one in pkgutil.walk_packages([f"{st.__path__[0]}/{part}"], f"sentence_transformers.{part}."):
            if re.search(r"\.model$|\.modules\b", one.name):
                tree = ast.parse(inspect.getsource(importlib.import_module(one.name)))
                named |= {
                    node.value
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and A_FILE.fullmatch(node.value)
                }
    assert named - FILES.keys() == set()
    assert {"modules.json", "artifact.metadata", "pytorch_model.bin"} <= named


def test_every_file_of_transformers_is_in_the_table():
    constants = {**vars(utils), **vars(tokenization)}
    named = {
        one for name, one in constants.items() if name.isupper() and isinstance(one, str) and A_FILE.fullmatch(one)
    }
    assert named - FILES.keys() == set()
    assert "tokenizer_config.json" in named


def test_every_key_of_a_tokenizer_is_in_its_table():
    read = set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', inspect.getsource(PreTrainedTokenizerBase.__init__)))
    read |= {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "extra_special_tokens"}
    assert read - known(TOKENIZER) == set()


def test_every_key_of_any_config_is_in_its_table():
    read = set(inspect.signature(PreTrainedConfig.__init__).parameters) - {"self", "kwargs"}
    assert read - known(CONFIG) == set()
