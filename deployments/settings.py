"""All `args` of embeddings, and what generation shares with them, typed. Unknown keys are errors. An error names the
key and says what is wrong in one sentence.

`Settings` is the application's `args` in the Serve config. A change redeploys the application.
`RouterConfig` (`embedding.config`) is the Router's `user_config` in the same file. A change applies without a restart.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from deployments.errors import SettingsError

T = TypeVar("T", bound=BaseModel)
Auto = Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Kind = Literal["embedding", "reranker", "classifier", "sparse", "multi_vector"]  # what a model computes from a text
PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Depth = Annotated[int, Field(ge=0, le=100_000)]
Share = Annotated[float, Field(gt=0, le=1)]
_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Strict):
    """The model to serve. `id`: hub name, local folder, or `package:NAME/FOLDER` inside an installed package."""

    id: str = Field(min_length=1)
    revision: str | None = None
    name: str | None = None  # the name that clients send; none: the id; any: every name is accepted
    aliases: list[Annotated[str, Field(min_length=1)]] = []  # more names, for clients that cannot change theirs
    kind: Auto | Kind = "auto"  # auto: as the model's own files say
    trust_remote_code: bool = False  # true: runs Python code that comes with the model
    tokenizer: Literal["auto", "file", "transformers"] = "auto"  # auto: tokenizer.json, checked against transformers
    pooling: Literal["auto", "cls", "mean", "last"] = "auto"
    normalize: Auto | bool = "auto"
    default_prompt_name: str | None = None  # the prompt for requests that name none; none: the model's own default
    max_tokens: PositiveInt | None = None  # lowers the model's own limit, never raises it
    template: Auto | Literal["qwen3-reranker", "mxbai-rerank-v2"] = "auto"  # the prompt of a reranking language model
    instruction: str | None = None  # the instruction in such a prompt; none: the model's own

    @property
    def any_name(self) -> bool:
        """Whether clients may send any name."""
        return self.name == "any"

    @property
    def served_name(self) -> str:
        """The model's name in answers."""
        return self.id if self.any_name else self.name or self.id


class EmulatedDevice(Strict):
    """A simulated device. It answers C queries of 75 tokens after `alpha_s * C + beta_s`, with meaningless unit
    vectors. A query of n tokens counts as n / 75; `beta_s` is paid once per run.
    """

    alpha_s: Annotated[float, Field(ge=0)]
    beta_s: Annotated[float, Field(ge=0)]
    micro_batch_queries: PositiveInt | None = None  # this many answers leave together; none: all at the run's end
    tile_queries: PositiveInt = 1  # a run's cost is rounded up to the next multiple of this many of its mean query
    curvature: Annotated[float, Field(ge=0)] = 0.0  # w seconds of work, without beta_s, take w * (1 + curvature * w)
    drift: Annotated[float, Field(ge=1)] = 1.0  # the device becomes this many times slower while it is in use
    drift_after_s: Annotated[float, Field(ge=0)] = 0.0  # runs that start earlier after the device's start do not drift
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # standard deviation, as a share of the latency
    outlier_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    outlier_factor: Annotated[float, Field(ge=1)] = 3.0  # mean slowdown of an outlier; uniform within a third: 2 to 4
    seed: int = 0
    time_scale: Seconds = 1.0  # 0.1: all times, drift_after_s included, are a tenth


class Autoscaled(Strict):
    """The number of replicas follows the load. `target_utilization`: how full their queues are kept, as a share of the
    SLO or the depth.
    """

    min: PositiveInt
    max: PositiveInt
    target_utilization: Share = 0.7
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0  # how long more must be needed; default as in Serve
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0  # how long fewer must be enough; default as in Serve

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is less than min ({self.min})")
        return self


_REPLICAS = ("number", "bounds")  # the forms of `replicas`
Replicas = Annotated[
    Annotated[Auto | PositiveInt, Tag(_REPLICAS[0])] | Annotated[Autoscaled, Tag(_REPLICAS[1])],
    Discriminator(lambda given: _REPLICAS[isinstance(given, (dict, Autoscaled))]),
]


class PoolPlace(Strict):
    """Which devices a pool's replicas get, whatever they compute."""

    replicas: Replicas = "auto"  # auto: one for each device, or machine, at deployment
    engine: Literal["torch", "emulated"] = "torch"
    dtype: Dtype = "auto"  # auto: the fastest here that keeps cosine >= 0.999 to float32
    batch_timeout_s: Seconds = 30.0  # after a longer engine run the device counts as hung: the replica is replaced


class AcceleratorPlace(PoolPlace):
    """The accelerator pool. `device`: `auto` takes what the cluster has, NPU before GPU; `cpu` is for development;
    `none` uses no accelerator.
    """

    device: Literal["auto", "npu", "cuda", "cpu", "none"] = "auto"
    # Replicas that share a device and its memory, each with its own depth. 2: where one process cannot fill the device.
    replicas_per_device: Annotated[int, Field(ge=1, le=100)] = 1

    @field_validator("replicas_per_device")
    @classmethod
    def _a_device_is_shared(cls, given: int, info: ValidationInfo) -> int:
        if given > 1 and info.data.get("device") in {"cpu", "none"}:
            raise ValueError(f"{given} replicas need an accelerator to share, but device is {info.data['device']}")
        return given


class CpuPlace(PoolPlace):
    """The CPU pool: by default one instance per machine, on the highest three quarters of its cores (Section IV-D)."""

    instance_per: Literal["machine", "numa_node"] = "machine"
    cores: Auto | PositiveInt = "auto"  # for each instance
    num_cpus: Auto | Annotated[float, Field(ge=0)] = "auto"  # CPUs that Ray's scheduler reserves for each instance
    share: Annotated[float, Field(gt=0)] = 1.0  # weight among several models: twice the weight gets twice the cores


class EngineSettings(PoolPlace):
    """The engine of embeddings in either pool."""

    max_batch_tokens: PositiveInt = 16_384  # the most tokens in one pass of the model: limits memory, not admission
    emulated: EmulatedDevice | None = None

    @model_validator(mode="after")
    def _emulated_is_described(self) -> Self:
        if self.engine == "emulated" and self.emulated is None:
            raise ValueError("engine: emulated needs `emulated: {alpha_s: ..., beta_s: ...}` beside it")
        if self.engine != "emulated" and self.emulated is not None:
            raise ValueError(f"`emulated` is given but the engine is {self.engine}: remove one of them")
        return self


class AcceleratorSettings(AcceleratorPlace, EngineSettings):
    """The accelerator pool of embeddings."""


class CpuSettings(CpuPlace, EngineSettings):
    """The CPU pool of embeddings."""


class BodyLimits(Strict):
    """Limits on any request."""

    max_body_bytes: PositiveInt = 16 * 2**20


class RequestLimits(BodyLimits):
    """Limits on a request, checked before any expensive work."""

    max_inputs_per_request: PositiveInt = 2048
    auto_truncate: bool = True  # if a request does not say: true cuts inputs that are too long, false refuses them


class Traces(Strict):
    """Where spans are sent, by OTLP over gRPC. The Router's OTEL_* variables replace what is left out."""

    endpoint: Annotated[str, Field(pattern="^https?://")] | None = None  # the collector's: http://HOST:4317
    # The share of requests to sample, among those that come without a sampled trace.
    sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None


class ApplicationSettings(Strict):
    """The `args` of any application."""

    api_keys: str | None = None  # the source of clients' API keys, file:PATH or env:NAME; none: no key is needed
    cors_allow_origins: list[str] = []  # sites whose pages may send requests, https://app.example.com; ["*"]: any
    page: bool = True  # show a status page to browsers at /; false: they get an error
    # CPUs take the accelerator's overflow; false: only the accelerator answers; auto: where that adds 5 % or more (of
    # generated text: as true).
    cpu_overflow: Auto | bool = "auto"
    accelerator: AcceleratorPlace = AcceleratorPlace()
    cpu: CpuPlace = CpuPlace()
    limits: BodyLimits = BodyLimits()
    traces: Traces | None = None  # none: no request is traced
    # How long the start waits for nodes to join before it fails because the cluster lacks resources. Set `replicas` to
    # numbers with it: `auto` takes what is there at the time.
    wait_for_nodes_s: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("api_keys", mode="before")
    @classmethod
    def _keys_are_elsewhere(cls, given: Any) -> Any:
        """Check `api_keys` without showing its value: a wrong one may be a key itself."""
        kind, _, where = given.partition(":") if isinstance(given, str) else ("", "", "")
        if given is not None and (kind not in {"file", "env"} or not where):
            raise ValueError("should say where the keys are, file:PATH or env:NAME; do not put keys into the config")
        if kind == "file" and not where.startswith(("/", "~")):
            raise ValueError("file: needs an absolute path, /..., because it is read on every node with a Router")
        return given

    @field_validator("cors_allow_origins")
    @classmethod
    def _origins_are_as_browsers_send_them(cls, given: list[str]) -> list[str]:
        if given == ["*"]:
            return given
        for origin in given:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin as browsers send it, such as https://app.example.com: use lower-case "
                    'ASCII, no path, no pattern, and a port only if it is not the default; ["*"] alone allows any'
                )
        return given


class OneModelSettings(ApplicationSettings):
    """The `args` of an application with one model."""

    model: ModelSettings

    @model_validator(mode="after")
    def _emulated_and_real_never_mix(self) -> Self:
        if len({pool.engine == "emulated" for pool in self._used_pools()}) > 1:
            raise ValueError(
                "accelerator.engine and cpu.engine: emulated and real engines cannot be mixed in one application"
            )
        return self

    def _used_pools(self) -> list[PoolPlace]:
        """The pools that may be used on some cluster."""
        used: list[PoolPlace] = [self.accelerator] if self.accelerator.device != "none" else []
        may_lack_accelerator = self.accelerator.device in {"auto", "none"} and self.accelerator.engine != "emulated"
        if self.cpu_overflow or may_lack_accelerator:
            used.append(self.cpu)
        return used

    @property
    def emulated(self) -> bool:
        return self._used_pools()[0].engine == "emulated"

    def check_slo(self, slo_s: float, key: str) -> None:
        """A batch may take as long as the SLO. Raises SettingsError if its replica would then count as hung."""
        timeout_s = min(pool.batch_timeout_s for pool in self._used_pools())
        if slo_s > timeout_s:
            raise SettingsError(
                key,
                f"a batch may take as long, {slo_s:g} s, and batch_timeout_s takes a replica for hung after "
                f"{timeout_s:g} s: raise that as well",
            )


class SharedSettings(ApplicationSettings):
    """The `args` of embeddings, for one model or several."""

    accelerator: AcceleratorSettings = AcceleratorSettings()
    cpu: CpuSettings = CpuSettings()
    limits: RequestLimits = RequestLimits()


class Settings(SharedSettings, OneModelSettings):
    """The application's `args`. With several models: the settings of one of them (`serve_app.config.models`)."""

    @classmethod
    def parse(cls, raw: Any) -> Settings:
        """Read the `args` of a Serve config. Raises SettingsError, which names the key."""
        return parse_settings(cls, raw, "args")


class LogConfig(Strict):
    """What the Router of any application logs."""

    access_log: Literal["off", "slow", "errors", "all"] = "off"  # the requests for which the Router logs a JSON line

    @field_validator("access_log", mode="before")
    @classmethod
    def _off_is_a_word(cls, given: Any) -> Any:
        return "off" if given is False else given  # YAML reads it as false


_BRANCHES = {"int", "float", "bool", "str", *_REPLICAS}


def parse_settings(model: type[T], raw: Any, root: str) -> T:
    """Validate values from YAML or JSON as a `model`. Raises SettingsError, which names the key, below `root`."""
    if raw is None:
        raise SettingsError(root, "missing; set it")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _first_problem(root, error) from None


def _first_problem(root: str, invalid: ValidationError) -> SettingsError:
    """The first problem, in one sentence. An unknown key comes before a missing one, since a typo causes both."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for found in invalid.errors(include_url=False):
        path = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"] if not _is_branch(part)]
        key = "".join([root, *path[: -1 if found["type"] == "invalid_key" else None]])
        by_key.setdefault(key, []).append(dict(found))
    key, problems = min(by_key.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    match problems[0]["type"]:
        case "extra_forbidden":
            return SettingsError(key, "there is no such setting")
        case "missing" | "string_too_short" as kind:
            return SettingsError(key, "missing" if kind == "missing" else "must not be empty")
        case "invalid_key":
            read_as = problems[0]["input"]
            return SettingsError(key, f"YAML reads a key as {read_as!r}: put it in quotes")
        case "value_error":
            return SettingsError(key, str(problems[0]["msg"]).removeprefix("Value error, "))
    wanted = " or ".join(str(problem["msg"]).removeprefix("Input should be ") for problem in problems)
    if problems[0]["type"] in {"model_type", "dict_type"}:
        wanted = "a mapping of settings"
    given = problems[0]["input"]
    shown = repr(given) if isinstance(given, (str, int, float, bool, type(None))) else f"a {type(given).__name__}"
    return SettingsError(key, f"should be {wanted}, not {shown}")


def _is_branch(part: str | int) -> bool:
    """Whether a part of a location is a union's branch, which pydantic adds (`cores.int`) and users do not know."""
    return str(part).startswith(("literal[", "constrained-", "function-")) or part in _BRANCHES
