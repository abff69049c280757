"""Request bodies of Ollama's routes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from deployments.models.text_pairs import NO_BOUNDS, TokenBounds
from deployments.models.tokenizer import Query
from serve_app.embedding.options import Options
from serve_app.web.fields import Constraint, DimensionsOrAll, Fields, Model, Text, one_or_many


class ModelOptions(Fields):
    """Ollama's `options`."""

    num_ctx: int | None = None
    """Maximum tokens per input, special tokens included; `truncate` decides on longer ones. 0: the model's maximum."""

    unused: ClassVar = {
        **dict.fromkeys(
            ("num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread", "draft_num_predict"),
            "the server's settings decide how the model runs",
        ),
        **dict.fromkeys(
            (
                *("num_keep", "seed", "num_predict", "top_k", "top_p", "min_p", "typical_p", "repeat_last_n"),
                *("temperature", "repeat_penalty", "presence_penalty", "frequency_penalty", "stop"),
            ),
            "it applies only to generated text",
        ),
    }


class OllamaOptions(Options):
    """The fields that Ollama's routes share."""

    model: Model = None
    options: ModelOptions = ModelOptions()

    unused: ClassVar = {"keep_alive": "the model stays loaded"}

    @property
    def bounds(self) -> TokenBounds:
        most = self.options.num_ctx
        return NO_BOUNDS if most is None or most <= 0 else TokenBounds(query=most)


class OllamaEmbedRequest(OllamaOptions):
    """Ollama's `POST /api/embed`."""

    input: str | Annotated[list[Text], Constraint("a list of strings", "max_inputs", may_be_empty=True)] = ""
    """An empty string or list gets no vectors."""
    dimensions: DimensionsOrAll = None

    @property
    def queries(self) -> Sequence[Query]:
        return one_or_many(self.input) if self.input else []


class OllamaPromptRequest(OllamaOptions):
    """Ollama's older `POST /api/embeddings`."""

    prompt: str = ""
    """An empty string gets an empty vector."""

    @property
    def queries(self) -> Sequence[Query]:
        return [self.prompt] if self.prompt else []


class OllamaShowRequest(Fields):
    """Ollama's `POST /api/show`."""

    model: Model = None

    other_names: ClassVar = {"name": "model"}
    unused: ClassVar = dict.fromkeys(
        ("verbose", "system", "template", "options"), "the answer describes the model as it is served"
    )
