"""Every setting, typed, in one place. Unknown keys are errors; a bad value is refused with its key and one sentence.

`Settings` is what the Serve config gives as `args` (changing it redeploys the application).
`RouterConfig` is the Router's `user_config` in the same file (changing it applies in place, without a restart).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from deployments.errors import SettingsError

T = TypeVar("T", bound=BaseModel)
Auto = Literal["auto"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Kind = Literal["embedding", "reranker", "classifier", "sparse", "multi_vector"]  # what a model makes of a text
PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Depth = Annotated[int, Field(ge=0, le=100_000)]
Share = Annotated[float, Field(gt=0, le=1)]
_ORIGIN = re.compile(r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSettings(Strict):
    """Which model is served. `id`: hub name, local folder, or `package:NAME/FOLDER` inside an installed package."""

    id: str = Field(min_length=1)
    revision: str | None = None
    name: str | None = None  # what clients call it; the id itself if not given; any: the id, and whatever they send
    aliases: list[Annotated[str, Field(min_length=1)]] = []  # more names, for clients that cannot change theirs
    kind: Auto | Kind = "auto"  # auto: as the model's own files say
    trust_remote_code: bool = False  # true runs Python code that comes with the model
    tokenizer: Literal["auto", "file", "transformers"] = "auto"  # auto: tokenizer.json, held against transformers
    pooling: Literal["auto", "cls", "mean", "last"] = "auto"
    normalize: Auto | bool = "auto"
    default_prompt_name: str | None = None  # of the model's prompts, for texts whose request names none; none: its own
    max_tokens: PositiveInt | None = None  # lowers the model's own limit, never raises it
    template: Auto | Literal["qwen3-reranker", "mxbai-rerank-v2"] = "auto"  # the prompt of a reranking language model
    instruction: str | None = None  # what such a prompt asks for; none: the model's own

    @property
    def any_name(self) -> bool:
        """The name that a client sends does not matter."""
        return self.name == "any"

    @property
    def served_name(self) -> str:
        """The model's own name, which answers carry."""
        return self.id if self.any_name else self.name or self.id


class EmulatedDevice(Strict):
    """A device that is not at hand: answers C queries of 75 tokens after `alpha_s * C + beta_s`, with unit vectors that
    mean nothing. A query of n tokens counts n / 75; `beta_s` is paid once a run.
    """

    alpha_s: Annotated[float, Field(ge=0)]
    beta_s: Annotated[float, Field(ge=0)]
    micro_batch_queries: PositiveInt | None = None  # so many leave together, in order; none: all at the end of the run
    tile_queries: PositiveInt = 1  # larger: a run costs as much as the next multiple of so many of its mean query
    curvature: Annotated[float, Field(ge=0)] = 0.0  # larger: w seconds of work take w * (1 + curvature * w); beta_s not
    drift: Annotated[float, Field(ge=1)] = 1.0  # larger: the device becomes so many times slower while it is in use
    drift_after_s: Annotated[float, Field(ge=0)] = 0.0  # later: runs that start before keep their speed; from the start
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0  # standard deviation, share of the latency
    outlier_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    outlier_factor: Annotated[float, Field(ge=1)] = 3.0  # on average; uniform within a third of it: 2 to 4
    seed: int = 0
    time_scale: Seconds = 1.0  # 0.1 lets a second pass in a tenth, also those of drift_after_s


class Autoscaled(Strict):
    """Replicas that follow the load, by `target_utilization`: how full the queues are kept, of the SLO or the depth."""

    min: PositiveInt
    max: PositiveInt
    target_utilization: Share = 0.7
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0  # so long more must be wanted; Serve's own default
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0  # so long fewer must do; Serve's own default

    @model_validator(mode="after")
    def _bounds_are_bounds(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is less than min ({self.min})")
        return self


_REPLICAS = ("number", "bounds")  # what `replicas` may be
Replicas = Annotated[
    Annotated[Auto | PositiveInt, Tag(_REPLICAS[0])] | Annotated[Autoscaled, Tag(_REPLICAS[1])],
    Discriminator(lambda given: _REPLICAS[isinstance(given, (dict, Autoscaled))]),
]


class PoolPlace(Strict):
    """Which devices a pool's replicas get, whatever they compute."""

    replicas: Replicas = "auto"  # auto: one for each device, or machine, when it is deployed
    engine: str = "torch"
    dtype: Dtype = "auto"  # auto: the quickest that keeps cosine >= 0.999 to float32 here
    batch_timeout_s: Seconds = 30.0  # one engine run longer than this is a hung device: the replica is replaced


class AcceleratorPlace(PoolPlace):
    """`device: auto` takes what the cluster has (NPU before GPU); `cpu` is for development; `none` leaves it unused."""

    device: Literal["auto", "npu", "cuda", "cpu", "none"] = "auto"
    engine: Literal["torch", "emulated"] = "torch"


class CpuPlace(PoolPlace):
    """One instance a machine by default, on the high three quarters of its cores (Section IV-D)."""

    instance_per: Literal["machine", "numa_node"] = "machine"
    cores: Auto | PositiveInt = "auto"  # for each instance
    num_cpus: Auto | Annotated[float, Field(ge=0)] = "auto"  # what Ray's scheduler books for each instance
    share: Annotated[float, Field(gt=0)] = 1.0  # of several models: twice as much gets twice the cores


class EngineSettings(PoolPlace):
    """Of an engine of embeddings, on either pool."""

    max_batch_tokens: PositiveInt = 16_384  # most tokens in one pass of the model: bounds memory, not admission
    emulated: EmulatedDevice | None = None

    @model_validator(mode="after")
    def _emulated_is_described(self) -> Self:
        if self.engine == "emulated" and self.emulated is None:
            raise ValueError("engine: emulated needs `emulated: {alpha_s: ..., beta_s: ...}` beside it")
        if self.engine != "emulated" and self.emulated is not None:
            raise ValueError(f"`emulated` is given but the engine is {self.engine}: remove one of them")
        return self


class AcceleratorSettings(AcceleratorPlace, EngineSettings):
    """Of embeddings."""


class CpuSettings(CpuPlace, EngineSettings):
    """Of embeddings."""

    engine: Literal["auto", "torch", "openvino", "emulated"] = "auto"  # auto: the quickest of those installed


class BodyLimits(Strict):
    """Of any request."""

    max_body_bytes: PositiveInt = 16 * 2**20


class RequestLimits(BodyLimits):
    """Bounds on one request, checked before any expensive work."""

    max_inputs_per_request: PositiveInt = 2048
    auto_truncate: bool = True  # cut a too long input where the request does not say; false: refuse it


class Traces(Strict):
    """Where spans go, by OTLP over gRPC. What is left out is as the variables OTEL_* say where a Router runs."""

    endpoint: Annotated[str, Field(pattern="^https?://")] | None = None  # the collector's: http://HOST:4317
    sample_ratio: Annotated[float, Field(ge=0, le=1)] | None = None  # of requests that come without a sampled trace


class ApplicationSettings(Strict):
    """What `args` say, whatever is computed."""

    api_keys: str | None = None  # where the keys are that clients must show: file:PATH or env:NAME; none: all may ask
    cors_allow_origins: list[str] = []  # of other sites' pages, https://app.example.com; ["*"]: any page may ask
    page: bool = True  # a browser that asks for / sees how the service does; false: it gets an error
    cpu_overflow: bool = True  # CPU helps the accelerator; off: the accelerator's queue only
    accelerator: AcceleratorPlace = AcceleratorPlace()
    cpu: CpuPlace = CpuPlace()
    limits: BodyLimits = BodyLimits()
    traces: Traces | None = None  # none: no request is traced
    # How long the start waits for nodes that are still to join, before it is refused for what the cluster lacks. It
    # takes `replicas` in numbers: `auto` goes by what is there at the time.
    wait_for_nodes_s: Annotated[float, Field(ge=0)] = 0.0

    @field_validator("api_keys", mode="before")
    @classmethod
    def _keys_are_elsewhere(cls, given: Any) -> Any:
        """What is wrong here may be a key itself, so it is never shown."""
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
    """What `args` say of one model and its pools."""

    model: ModelSettings

    @model_validator(mode="after")
    def _emulated_and_real_never_mix(self) -> Self:
        if len({pool.engine == "emulated" for pool in self._used_pools()}) > 1:
            raise ValueError(
                "accelerator.engine and cpu.engine: emulated and real engines cannot be mixed in one application"
            )
        return self

    def _used_pools(self) -> list[PoolPlace]:
        """The pools that may come to be, on whatever cluster."""
        used: list[PoolPlace] = [self.accelerator] if self.accelerator.device != "none" else []
        may_lack_accelerator = self.accelerator.device in {"auto", "none"} and self.accelerator.engine != "emulated"
        if self.cpu_overflow or may_lack_accelerator:
            used.append(self.cpu)
        return used

    @property
    def emulated(self) -> bool:
        return self._used_pools()[0].engine == "emulated"

    def check_slo(self, slo_s: float, key: str) -> None:
        """A batch may take as long as the SLO. Raises SettingsError where its replica would be taken for hung."""
        timeout_s = min(pool.batch_timeout_s for pool in self._used_pools())
        if slo_s > timeout_s:
            raise SettingsError(
                key,
                f"a batch may take as long, {slo_s:g} s, and batch_timeout_s takes a replica for hung after "
                f"{timeout_s:g} s: raise that as well",
            )


class SharedSettings(ApplicationSettings):
    """What `args` say of embeddings, whether by one model or by several."""

    accelerator: AcceleratorSettings = AcceleratorSettings()
    cpu: CpuSettings = CpuSettings()
    limits: RequestLimits = RequestLimits()


class Settings(SharedSettings, OneModelSettings):
    """The application's `args`; of several models, what they say of one (`serve_app.config.models`)."""

    @classmethod
    def parse(cls, raw: Any) -> Settings:
        """The `args` of a Serve config as typed settings. Raises SettingsError that names the key."""
        return parse_settings(cls, raw, "args")


class TrialGrant(Strict):
    """Lets the holder of a secret, a calibration run, have its own queries admitted by depths that it names itself."""

    secret_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    expires_at: Annotated[float, Field(ge=0)]  # Unix time, s: a run that was killed leaves nothing open


class LogConfig(Strict):
    """What the Router of any application logs."""

    access_log: Literal["off", "slow", "errors", "all"] = "off"  # of which requests the Router writes a JSON line

    @field_validator("access_log", mode="before")
    @classmethod
    def _off_is_a_word(cls, given: Any) -> Any:
        return "off" if given is False else given  # YAML reads it as false


RENAMED = {  # settings of earlier versions
    "heterogeneous": "cpu_overflow",
    "stuck_after_s": "batch_timeout_s",
    "replicas.fill": "target_utilization",
    "fair_share.run": "max_batch_fraction",
    "pass_queries": "micro_batch_queries",
    "step_tokens": "max_num_batched_tokens",
    "host_blocks": "num_cpu_blocks",
    "ping_s": "sse_keepalive_s",
    "unread_tokens": "max_buffered_tokens",
    "most_answers": "max_answers",
    "most_prompts": "max_prompts",
}
_BRANCHES = {"int", "float", "bool", "str", *_REPLICAS}


def parse_settings(model: type[T], raw: Any, root: str) -> T:
    """What was read from YAML or JSON, as a `model`. Raises SettingsError that names the key, below `root`."""
    if raw is None:
        raise SettingsError(root, "missing; set it")
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _first_problem(root, error) from None


def _first_problem(root: str, invalid: ValidationError) -> SettingsError:
    """The first problem as one sentence; an unknown key before a missing one, since a typo makes both."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for found in invalid.errors(include_url=False):
        path = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"] if not _is_branch(part)]
        key = "".join([root, *path[: -1 if found["type"] == "invalid_key" else None]])
        by_key.setdefault(key, []).append(dict(found))
    key, problems = min(by_key.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    match problems[0]["type"]:
        case "extra_forbidden":
            new_name = next((new for old, new in RENAMED.items() if key.endswith(f".{old}")), None)
            return SettingsError(key, f"was renamed: use {new_name}" if new_name else "there is no such setting")
        case "missing" | "string_too_short" as kind:
            return SettingsError(key, "missing" if kind == "missing" else "must not be empty")
        case "invalid_key":
            read_as = problems[0]["input"]
            return SettingsError(key, f"YAML reads a key as {read_as!r}: put it in quotes")
        case "value_error":
            return SettingsError(key, str(problems[0]["msg"]).removeprefix("Value error, "))
    if key.endswith(".admission") and problems[0]["input"] == "finish":
        return SettingsError(key, "finish was renamed: use deadline")
    wanted = " or ".join(str(problem["msg"]).removeprefix("Input should be ") for problem in problems)
    if problems[0]["type"] in {"model_type", "dict_type"}:
        wanted = "a mapping of settings"
    given = problems[0]["input"]
    shown = repr(given) if isinstance(given, (str, int, float, bool, type(None))) else f"a {type(given).__name__}"
    return SettingsError(key, f"should be {wanted}, not {shown}")


def _is_branch(part: str | int) -> bool:
    """Pydantic adds a union's branch to the location (`cores.int`); the user knows no branches."""
    return str(part).startswith(("literal[", "constrained-", "function-")) or part in _BRANCHES
