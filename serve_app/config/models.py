"""Several models in one application: their settings, and which names each answers to. Pure.

`args` contain a list `models` instead of `model`. The settings beside the list apply to all models; an entry's own
`accelerator`, `cpu` or `cpu_overflow` replaces them. The Router's `user_config` has `models` too: a mapping from a
model's name to the settings of that model only.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import Field, model_validator

from deployments.embedding.config import RouterConfig
from deployments.errors import SettingsError, UnknownModel
from deployments.hardware.device_detector import ACCELERATOR, CPU
from deployments.models.model_files import ModelCard, read_model_card
from deployments.models.model_folder import pinned
from deployments.settings import (
    AcceleratorSettings,
    ApplicationSettings,
    Auto,
    CpuSettings,
    ModelSettings,
    OneModelSettings,
    Settings,
    SharedSettings,
    Strict,
    parse_settings,
)

T = TypeVar("T")
U = TypeVar("U")
S = TypeVar("S", bound=OneModelSettings)

EMBEDDINGS, GENERATION = "serve_app.app:build", "serve_app.generation.generation_app:build"
IMPORT_PATHS = (EMBEDDINGS, GENERATION)
# The keys of `user_config` that apply to all models.
SHARED_CONFIG = ("slo_s", "admission", "request_timeout_s", "bulk", "access_log")


LATEST = ":latest"  # the tag that Ollama's clients append to a name


def unknown_model(name: str, there: tuple[str, ...]) -> UnknownModel:
    return UnknownModel(f"there is no model '{name}' here; this server serves {listed(there)}", param="model")


def listed(names: tuple[str, ...]) -> str:
    *others, last = (f"'{name}'" for name in names)
    return f"{', '.join(others)} and {last}" if others else last


class ArgsOf(ABC, Generic[S]):
    """The `args` of an application. `models`: each model's settings by its name. The first is the default model.

    `several`: the config lists models, so each model's part of a `user_config` is under its name.
    """

    several: bool = False
    shared: ApplicationSettings
    models: dict[str, S]
    pools: ClassVar[Mapping[str, str]]  # the name of each pool's deployment

    @abstractmethod
    def router_configs(self, raw: Any) -> Mapping[str, object]:
        """Each model's part of the Router's `user_config`. Raises SettingsError."""

    @abstractmethod
    def read_card(self, model: ModelSettings) -> object:
        """Check a model's files, downloading them if necessary. Raises SettingsError."""

    def find_models(self) -> None:
        """Check each model's files, downloading them if necessary. Raises SettingsError."""
        for name, settings in self.models.items():
            with self.locating(name):
                self.read_card(settings.model)

    def pin_revisions(self) -> None:
        """Replace the revision of each model from the hub by the commit it names now. Raises SettingsError."""
        for name, settings in self.models.items():
            with self.locating(name):
                self.models[name] = settings.model_copy(update={"model": pinned(settings.model)})

    def deployments(self) -> dict[str, dict[str, str]]:
        """Model -> pool -> the name of its Serve deployment, which contains the model's name if there are several."""
        found: dict[str, dict[str, str]] = {}
        taken: list[str] = []
        for name in self.models:
            suffix = "-" + re.sub(r"[^A-Za-z0-9._-]+", "-", name) if self.several else ""  # Ray names files after it
            taken.append(suffix if suffix not in taken else f"{suffix}-{len(taken)}")
            found[name] = {pool: deployment + taken[-1] for pool, deployment in self.pools.items()}
        return found

    @contextmanager
    def locating(self, name: str) -> Iterator[None]:
        """Within this context, a SettingsError about this model names the key's place in the list."""
        try:
            yield
        except SettingsError as error:
            if not self.several:
                raise
            place = f"args.models[{list(self.models).index(name)}]"
            raise SettingsError(error.key.replace("args", place, 1), error.problem) from None


ApplicationArgs = ArgsOf[Any]


class ServedModel(Strict):
    """One of several models. It inherits what it leaves out from `args`."""

    model: ModelSettings
    cpu_overflow: Auto | bool | None = None
    accelerator: AcceleratorSettings | None = None
    cpu: CpuSettings | None = None


class SeveralSettings(SharedSettings):
    """The `args` of an application that serves several models."""

    models: Annotated[list[ServedModel], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [name for one in self.models for name in {one.model.served_name, *one.model.aliases}]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are called {name}; give one of them another model.name")
        if sum(one.model.any_name for one in self.models) > 1:
            raise ValueError("two models have the name any; only one model can answer to unknown names")
        return self

    def of(self, one: ServedModel, key: str) -> Settings:
        """The settings of one of the models, as if it were alone. Raises SettingsError."""
        shared = {name: getattr(self, name) for name in SharedSettings.model_fields}
        own = {name: value for name, value in one if value is not None}
        return parse_settings(Settings, shared | own, key)


class Args(ArgsOf[Settings]):
    """The `args` of an application that embeds, with one model or several."""

    shared: SharedSettings
    pools: ClassVar = {ACCELERATOR: "AcceleratorEmbedder", CPU: "CpuEmbedder"}

    def __init__(self, raw: Any) -> None:
        """Raises SettingsError that names the key."""
        self.several = isinstance(raw, dict) and "models" in raw
        if not self.several:
            self.shared = only = Settings.parse(raw)
            self.models = {only.model.served_name: only}
            return
        if "model" in raw:
            raise SettingsError("args.model", "args.models is set too; set only one of them")
        self.shared = shared = parse_settings(SeveralSettings, raw, "args")
        self.models = {
            one.model.served_name: shared.of(one, f"args.models[{index}]") for index, one in enumerate(shared.models)
        }
        if len({settings.emulated for settings in self.models.values()}) > 1:
            raise SettingsError("args.models", "emulated and real engines cannot be mixed in one application")

    def read_card(self, model: ModelSettings) -> ModelCard:
        return read_model_card(model)

    def by_model(self, of: Mapping[str, T]) -> ByModel[T]:
        """Look-up by any name of a model. `of`: one value per model, by the model's own name."""
        return ByModel(of, {name: settings.model for name, settings in self.models.items()})

    def router_configs(self, raw: Any, pools: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, RouterConfig]:
        """Each model's part of the Router's `user_config`, checked against its pools. Raises SettingsError."""
        pools, most = pools or {}, self.shared.limits.max_inputs_per_request
        shared, own = split_config(raw, tuple(self.models)) if self.several else (raw, {})
        found = {}
        for name, settings in self.models.items():
            mine, of_it = own.get(name, {}), pools.get(name, ())
            if self.several:
                config = _config_of(name, shared, mine, of_it, most)
            else:
                config = RouterConfig.parse(raw, of_it, max_inputs=most)
            inside = f".models.{name}" if "slo_s" in mine else ""
            settings.check_slo(config.slo_s, f"user_config{inside}.slo_s")
            found[name] = config
        return found


def split_config(raw: Any, names: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split a `user_config` into (settings for all models, settings by model name). Raises SettingsError."""
    if not isinstance(raw, dict):
        raise SettingsError("user_config", "missing; set it" if raw is None else "should be a mapping")
    shared = {key: value for key, value in raw.items() if key != "models"}
    for key in shared:
        if _of_one_model(key):
            raise SettingsError(f"user_config.{key}", "belongs to one model: put it under user_config.models.NAME")
    own = {} if raw.get("models") is None else raw["models"]
    if not isinstance(own, dict):
        raise SettingsError("user_config.models", "should be a mapping from a model's name to its settings")
    for name, given in own.items():
        if name not in names:
            raise SettingsError(f"user_config.models.{name}", f"no such model; this application has {listed(names)}")
        if given is not None and not isinstance(given, dict):
            raise SettingsError(f"user_config.models.{name}", "should be a mapping of settings")
    return shared, {name: given or {} for name, given in own.items()}


def _of_one_model(key: str) -> bool:
    return key in RouterConfig.model_fields and key not in SHARED_CONFIG


def _config_of(
    name: str, shared: dict[str, Any], own: dict[str, Any], pools: tuple[str, ...], max_inputs: int
) -> RouterConfig:
    key = f"user_config.models.{name}"
    try:
        return RouterConfig.parse(shared | own, pools, key, max_inputs=max_inputs)
    except SettingsError as error:
        inside = error.key.removeprefix(f"{key}.")
        first = inside.partition(".")[0]
        if first in own or _of_one_model(first):
            raise
        raise SettingsError(f"user_config.{inside}", error.problem) from None


class ByModel(Generic[T]):
    """One value per model, found by any of the model's names."""

    def __init__(self, of: Mapping[str, T], models: Mapping[str, ModelSettings] | None = None) -> None:
        """`of`: values by each model's own name. `models`: settings that may give a model further names."""
        self._of, self._models = dict(of), models or {}
        self._aliases = {
            alias: name for name, model in self._models.items() for alias in model.aliases if alias != name
        }
        self._anything = next((name for name, model in self._models.items() if model.any_name), None)

    def __iter__(self) -> Iterator[T]:
        """In the order of the settings."""
        return iter(self._of.values())

    @property
    def first(self) -> T:
        return next(iter(self))

    @property
    def names(self) -> tuple[str, ...]:
        """All known names: each model's own name, then its aliases."""
        return tuple(
            called for name in self._of for called in (name, *(a for a, of in self._aliases.items() if of == name))
        )

    def named(self, name: str) -> T:
        """Raises UnknownModel, which lists the known names."""
        if name not in self.names:
            name = name.removesuffix(LATEST)
        own = name if name in self._of else self._aliases.get(name, self._anything)
        if own is None:
            raise unknown_model(name, self.names)
        return self._of[own]

    def each(self, make: Callable[[T], U]) -> ByModel[U]:
        """Apply `make` to each value; the names stay the same."""
        return ByModel({name: make(one) for name, one in self._of.items()}, self._models)
