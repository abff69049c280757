"""Request bodies of `/v1/completions` and `/v1/chat/completions`. Pure.

Unknown fields are ignored. A field of OpenAI or vLLM that windve does not support is either refused by name
(`_UNSUPPORTED`) or has no effect (`_UNUSED`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from deployments.errors import InvalidInput
from deployments.generation.text.chat_template import Message, PromptEnd
from deployments.generation.text.sampling import Sampling
from deployments.generation.text.tool_calls import Form
from serve_app.generation.formats import grammar_of
from serve_app.generation.tools import Tool, ToolCall, ToolChoice, grammar_of_calls
from serve_app.web.fields import (
    Constraint,
    Fields,
    Inputs,
    Model,
    Refusal,
    RequestId,
    Rules,
    TokenId,
    Unsupported,
    WholeFrom0,
    WholeFrom1,
    one_or_many,
)

MOST_LOGPROBS = 20  # as OpenAI and vLLM
_Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS), Constraint(f"a whole number up to {MOST_LOGPROBS}")]
_MOST_STOPS, _LONGEST_STOP = 16, 256  # characters; each new token's text is searched for each of them
_LONGEST_ROLE = 64
_SEED = 2**63
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # by the model's files
_MOST_BIASED = 1024
_Penalty = Annotated[float, Field(ge=-2, le=2), Constraint("a number from -2 to 2")]
_StopIds = Annotated[list[TokenId], Constraint("a list of token ids", "most_stop_ids", may_be_empty=True)]
_Bias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MOST_BIASED),
    Constraint(f"an object of at most {_MOST_BIASED} token ids, each with a number from -100 to 100"),
]


def _except(*names: str, same: tuple[Any, ...] = (), why: str = "") -> dict[str, Unsupported]:
    return dict.fromkeys(names, Unsupported(same, why))


_NO_ANSWER = Refusal("an answer has at least one token", (0,))
_NO_STREAM = "the log probabilities of a prompt are sent whole; leave stream out"
_UNSUPPORTED: Mapping[str, Unsupported] = {
    **_except("routed_experts_prompt_start", same=(0,)),
    **_except("length_penalty", same=(1,)),
    **_except("use_beam_search", "include_stop_str_in_output", "watermarking", same=(False,)),
    **_except("return_tokens_as_token_ids", "return_token_offsets", same=(False,)),
    **_except("return_prompt_text", same=(False,)),
    **_except("skip_special_tokens", "spaces_between_special_tokens", same=(True,)),
    **_except("return_mm_kwargs", "include_reasoning", same=(True,)),
    **_except("bad_words", "documents", "logits_processors", same=([],)),
    **_except("functions", same=([],), why="send tools"),
    **_except("function_call", same=("none", "auto"), why="send tool_choice"),
    **_except("truncate_prompt_tokens", "allowed_token_ids", "structured_outputs"),
    **_except("guided_json", "guided_regex", "guided_choice", "guided_grammar", "json_schema", "logprob_token_ids"),
    **_except("chat_template", "audio", "web_search_options", "reasoning_effort", "prediction", "moderation"),
    **_except("prompt_embeds", "kv_transfer_params", "ec_transfer_params", "repetition_detection", "verbosity"),
    **_except("vllm_xargs", same=({},)),
    # Of SGLang, llama.cpp and TGI, which the text would depend on.
    **_except("grammar", "regex", "ebnf", "structural_tag", "stop_regex", "negative_prompt", "lora_path"),
    **_except("no_repeat_ngram_size", "mirostat", "xtc_probability", "dry_multiplier", "top_n_sigma", same=(0,)),
    **_except("repeat_penalty", "typical_p", same=(1,)),
    **_except("do_sample", same=(True,), why="send temperature: 0 for the likeliest tokens"),
    **_except("max_new_tokens", "n_predict", "max_length", why="send max_tokens"),
    **_except("random_seed", why="send seed"),
    **_except("media_io_kwargs", "mm_processor_kwargs", same=({},), why="only texts are supported"),
    "modalities": Unsupported((["text"],)),
    "suffix": Unsupported(("",)),
    "priority": Unsupported((0,), "the header x-windve-priority: bulk lets others go first"),
    "thinking_token_budget": Unsupported((-1,)),
    "stream_interval": Unsupported((1,), "each piece of text is sent as soon as it is ready"),
}
_UNUSED: Mapping[str, str] = {
    "user": "clients are told apart by their API keys",
    "safety_identifier": "clients are told apart by their API keys",
    **dict.fromkeys(("session_id", "prompt_cache_key"), "a prompt is found in the cache by its text; see cache_salt"),
    **dict.fromkeys(("prompt_cache_options", "prompt_cache_retention"), "the least recently used goes first"),
    **dict.fromkeys(("store", "metadata"), "answers are not stored"),
    "service_tier": "there is only one tier",
    "truncation_side": "prompts are never truncated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRules(Rules):
    """What this server accepts. `dimension` is unused here; `max_inputs`: most prompts in one request.

    - `default_tokens`: most tokens of an answer that continues a text if the request sets no maximum.
    - `max_answers`: most answers to one prompt (`n`).
    - `most_messages`: most messages in one chat.
    - `most_stop_ids`: most of `stop_token_ids`.
    - `most_tools`: most tools, and calls in one message.
    """

    default_tokens: int
    max_answers: int
    most_messages: int = 2048
    most_stop_ids: int = 128
    most_tools: int = 128


def _answers(value: Any, info: ValidationInfo) -> int:
    rules: Any = info.context
    if type(value) is not int or not 1 <= value <= rules.max_answers:
        problem = f"n must be a whole number from 1 to {rules.max_answers} (this server's bound), not {value}"
        raise InvalidInput(problem, param="n")
    return value


def _stops(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInput("stop must be a string or a list of strings", param="stop")
    if len(found) > _MOST_STOPS or any(len(one) > _LONGEST_STOP for one in found):
        problem = f"stop may have at most {_MOST_STOPS} strings of at most {_LONGEST_STOP} characters"
        raise InvalidInput(problem, param="stop")
    return [one for one in found if one]


def _only_text(value: Any) -> Any:
    if value != "text":
        raise InvalidInput(
            "only text is supported here, not images, audio or files; send parts of type text", param="messages"
        )
    return value


class StreamOptions(Fields):
    """How a stream is sent."""

    include_usage: bool = False
    """Send the token counts at the end of the stream."""
    continuous_usage_stats: bool = False
    """Send the token counts in each chunk too. Requires include_usage."""

    unused: ClassVar = {"include_obfuscation": "chunks are never padded"}


class CompletionOptions(Fields):
    """The fields that both routes share."""

    model: Model = None
    request_id: RequestId | None = None
    """The end of the answer's id. Replaces the header x-request-id."""
    max_tokens: WholeFrom1 | None = None
    """Maximum tokens of each answer. Null: in a chat to the context's end, as far as a replica can promise; else the
    server's setting.
    """
    temperature: Annotated[float, Field(ge=0, le=2), Constraint("a number from 0 to 2")] | None = None
    """0: always the likeliest token. Null: as the model's files say, else 1."""
    top_p: Annotated[float, Field(gt=0, le=1), Constraint("a number above 0, up to 1")] | None = None
    """Sample from the likeliest tokens whose probabilities add up to this. Null: as the model's files say, else 1."""
    top_k: Annotated[int, Field(ge=-1), Constraint("a whole number from 0")] | None = None
    """Sample from this many of the likeliest tokens. 0 and -1: all. Null: as the model's files say, else all."""
    min_p: Annotated[float, Field(ge=0, le=1), Constraint("a number from 0 to 1")] | None = None
    """Leave out tokens less likely than this part of the likeliest. Null: as the model's files say, else 0."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100), Constraint("a number above 0, up to 100")] | None = None
    """Above 1: tokens of the prompt and the answer become less likely. Null: as the model's files say, else 1."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    frequency_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens as often as the answer has them."""
    logit_bias: _Bias = Field(default_factory=dict)
    """What is added to the logits of these token ids."""
    seed: Annotated[int, Field(ge=-_SEED, lt=_SEED), Constraint("a whole number of 64 bits")] | None = None
    """The same seed gives the same answer."""
    n: Annotated[int, Field(ge=1, json_schema_extra={"maximum": "max_answers"}), BeforeValidator(_answers)] = 1
    """How many answers to generate per prompt."""
    best_of: int | None = None
    """Must equal `n`."""
    stop: Annotated[str | list[str], BeforeValidator(_stops)] = ""
    """A string or a list of strings. An answer ends before the first of them."""
    stop_token_ids: _StopIds = Field(default_factory=list)
    """Further tokens that end an answer."""
    min_tokens: WholeFrom0 = 0
    """Before so many tokens, no end token and no stop ends an answer."""
    prompt_logprobs: _Logprobs | None = None
    """Return the log probability and rank of each token of the prompt, and of this many alternatives. Runs as bulk."""
    return_token_ids: bool = False
    """Return the token ids of the prompt and of each answer."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: Annotated[str, Field(min_length=1), Constraint("a string that is not empty")] | None = None
    """Requests with the same value find each other's prompts and answers in the cache, if they have the same named API
    key or none. It should be hard to guess. Null: those with the same named API key do."""
    ignore_eos: bool = False
    """Continue after the model's end tokens."""
    response_format: Annotated[dict[str, Any] | None, Constraint("an object with type")] = None
    """`json_object`, or `json_schema` with a schema: each answer is such JSON."""

    unsupported: ClassVar = _UNSUPPORTED
    unused: ClassVar = _UNUSED
    refused: ClassVar = {
        "best_of": Refusal("all n answers are returned; leave it out", when="other than n"),
        "max_tokens": _NO_ANSWER,
        "prompt_logprobs": Refusal(_NO_STREAM, when="with stream"),
        "ignore_eos": Refusal("such an answer ends where it is whole", when="with response_format or tool_choice"),
    }

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("best_of") not in (None, fields.get("n") or 1):
            raise cls.refused["best_of"].error("best_of")
        return fields

    @model_validator(mode="after")
    def _scored_whole(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise self.refused["prompt_logprobs"].error("prompt_logprobs")
        return self

    @property
    def prompt_alternatives(self) -> int | None:
        """The value for `WantedGeneration.prompt_logprobs`."""
        return self.prompt_logprobs

    @property
    def most_tokens(self) -> int | None:
        """Maximum tokens of each answer; None if the request sets none."""
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; none is empty."""
        return tuple(self.stop)

    @property
    def alternatives(self) -> int | None:
        """The value for `WantedGeneration.logprobs`."""
        return None

    def grammar_in(self, form: Form | None) -> str:
        """What binds the answers of a model that writes calls of tools in that form, as in `Sampling`. Raises
        InvalidInput.
        """
        found = self._grammar(form)
        if found and self.ignore_eos:
            raise self.refused["ignore_eos"].error("ignore_eos")
        return found

    def _grammar(self, form: Form | None) -> str:  # noqa: ARG002 - for chats
        return grammar_of(self.response_format)

    def sampling(self, defaults: Sampling) -> Sampling:
        """The request's sampling options but its grammar, completed by the model's defaults."""
        asked = {name: getattr(self, name) for name in _DEFAULTED if getattr(self, name) is not None}
        return replace(
            defaults,
            **asked | ({"top_k": max(0, asked["top_k"])} if "top_k" in asked else {}),
            seed=self.seed,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((int(token), added) for token, added in self.logit_bias.items()),
        )


class CompletionRequest(CompletionOptions):
    """OpenAI's `POST /v1/completions`, with fields of vLLM."""

    prompt: Inputs
    max_tokens: WholeFrom0 | None = None
    """Maximum tokens of each answer. 0, with echo: only the prompt. Null: the server's setting."""
    logprobs: _Logprobs | None = None
    """Return the log probability of each token, and of this many alternatives."""
    echo: bool = False
    """Put the prompt before each answer. With logprobs, return those of its tokens, too; the request runs as bulk."""

    unsupported: ClassVar = {"add_special_tokens": Unsupported((True,))}
    refused: ClassVar = {
        "max_tokens": Refusal(
            "an answer has at least one token, unless echo puts the prompt there", when="0 without echo"
        ),
        "echo": Refusal(_NO_STREAM, when="with logprobs and stream"),
    }

    @model_validator(mode="after")
    def _echoed(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise self.refused["max_tokens"].error("max_tokens")
        if self.stream and self.echoed_logprobs is not None:
            raise self.refused["echo"].error("echo")
        return self

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """Raises InvalidInput."""
        return one_or_many(self.prompt)

    @property
    def most_tokens(self) -> int | None:
        """At least 1, because an engine computes one. At `max_tokens` 0 it is not sent."""
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def echoed_logprobs(self) -> int | None:
        """How many alternatives of each of the prompt's tokens are in `logprobs`; None if they are not there."""
        return self.logprobs if self.echo else None

    @property
    def prompt_alternatives(self) -> int | None:
        return max((one for one in (self.prompt_logprobs, self.echoed_logprobs) if one is not None), default=None)

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


class ContentPart(Fields):
    """A part of a message's content."""

    type: Annotated[Literal["text"], BeforeValidator(_only_text)]
    text: str


class ChatMessage(Fields):
    """One turn of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=_LONGEST_ROLE)]
    """system, user, assistant, or another that the model's chat template accepts. developer is read as system."""
    content: str | Annotated[list[ContentPart], Constraint("a list of parts, objects with type and text")]
    """Parts are joined by line breaks. It may be null beside tool_calls."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], Constraint("a list of calls", "most_tools", may_be_empty=True)] = Field(
        default_factory=list
    )

    @model_validator(mode="before")
    @classmethod
    def _calls(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("function_call"):
            raise InvalidInput("function_call in messages is not supported here; send tool_calls", param="messages")
        no_text = isinstance(fields, dict) and fields.get("tool_calls") and fields.get("content") is None
        return {**fields, "content": ""} if no_text else fields

    @property
    def plain(self) -> Message:
        """The message as a chat template takes it. Raises InvalidInput."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        calls = [one.plain for one in self.tool_calls] or None
        said = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls}
        return {"role": role, "content": text, **{key: value for key, value in said.items() if value is not None}}


class ChatRequest(CompletionOptions):
    """OpenAI's `POST /v1/chat/completions`, with fields of vLLM."""

    messages: Annotated[
        list[ChatMessage], Constraint("a list of messages, objects with role and content", "most_messages")
    ]
    max_completion_tokens: WholeFrom1 | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool = False
    """Return the log probability of each token."""
    top_logprobs: _Logprobs | None = None
    """Return this many alternatives for each token too. Requires logprobs."""
    add_generation_prompt: bool = True
    """End the prompt with the beginning of an answer."""
    continue_final_message: bool = False
    """Continue the last message; the prompt ends within it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, as in vLLM: for example Qwen3's `enable_thinking`."""

    tools: Annotated[list[Tool], Constraint("a list of functions", "most_tools", may_be_empty=True)] = Field(
        default_factory=list
    )
    """Functions that the model may call, if its chat template has them."""
    tool_choice: ToolChoice = "auto"
    """none, auto, required (at least one call), or a function that must be called."""
    parallel_tool_calls: bool = True
    """Whether required may be several calls."""

    unsupported: ClassVar = {"add_special_tokens": Unsupported((False,)), "echo": Unsupported((False,))}
    refused: ClassVar = {
        "max_completion_tokens": _NO_ANSWER,
        "response_format": Refusal("the answer may be a call", when="with tools and tool_choice auto"),
    }

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [] if self.tool_choice == "none" else [tool.plain for tool in self.tools]

    def _grammar(self, form: Form | None) -> str:
        called = grammar_of_calls(form, self.tools, self.tool_choice, several=self.parallel_tool_calls)
        if self.offered and not called and super()._grammar(form):
            raise self.refused["response_format"].error("response_format")
        return called or super()._grammar(form)

    @property
    def ends(self) -> PromptEnd:
        """Raises InvalidInput."""
        if not self.continue_final_message:
            return "answer" if self.add_generation_prompt else "turn"
        if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
            problem = "continue_final_message and add_generation_prompt are both true; send only one of them"
            raise InvalidInput(problem, param="continue_final_message")
        return "within"

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Raises InvalidInput."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidInput("top_logprobs requires logprobs: true; send both", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None
