"""What a check of devices does: each task is a function that a worker process calls. Imports torch only when called."""

from __future__ import annotations

import logging
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from calibration.devices.shapes import (
    BERT_LARGE,
    LLAMA_1B,
    MINILM,
    SHAPES,
    SMOLLM,
    BertShape,
    CausalShape,
    write_bert,
    write_causal,
    write_family,
)
from calibration.devices.timing import product_speed, products, rates, seconds_of
from deployments.engines import Engine, TokenBatch, create_engine, embed
from deployments.engines.torch_engine import TorchEngine, import_torch
from deployments.hardware.affinity import read_cpu_shape
from deployments.hardware.device_detector import quick_cpu_dtype
from deployments.models.model_files import ModelCard, read_model_card
from deployments.settings import AcceleratorSettings, CpuSettings, EngineSettings, ModelSettings

ROWS = (1, 32)
_TOKENS = 75  # of a lone query
_CACHED = 120  # tokens before each row of a step
_CONTEXT = 512

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and where. `device`: in torch's words, as "cuda:0". `least_s`: how long each figure's calls
    last. `scratch`: a folder for models.
    """

    device: str
    scratch: Path
    encoder: BertShape
    encoder_name: str
    batches: tuple[tuple[int, int], ...]  # tokens of a query, and queries at once
    square: int  # rows of the square product
    rows: int  # of the other products
    causal: CausalShape
    least_s: float
    texts: int  # in each request to the service
    clients: int
    load_s: float

    @classmethod
    def of(cls, device: str, scratch: Path, *, quick: bool) -> Plan:
        least_s, load_s = (0.3, 5.0) if quick else (2.0, 20.0)
        causal = SMOLLM if device == "cpu" else LLAMA_1B
        causal = causal.cut(4) if quick else causal
        if device == "cpu":
            batches = ((75, 32), (512, 4))
            return cls(device, scratch, MINILM, "MiniLM's", batches, 1024, 1024, causal, least_s, 1, 16, load_s)
        batches = ((75, 256), (512, 256))
        return cls(device, scratch, BERT_LARGE, "BERT-large's", batches, 8192, 16_384, causal, least_s, 16, 64, load_s)

    def settings(self) -> EngineSettings:
        return CpuSettings() if self.device == "cpu" else AcceleratorSettings()


class Task(NamedTuple):
    """`part`: the heading under which its figures stand. `run`: can be pickled."""

    part: str
    name: str
    run: Callable[[], Figures]


PARTS = {
    "peak": "the largest products of matrices, which give the device's peak",
    "families": "each packed family, tiny: the form chosen and why, agreement with float32",
    "encoder": "queries/s and tokens/s from token ids, beside the peak; a lone query",
    "generation": "steps of a language model with 1 and 32 rows",
    "service": "a whole service of that encoder at 0.8 and 2 times its capacity",
}


def tasks(plan: Plan, parts: tuple[str, ...]) -> Iterator[Task]:
    """The tasks of these parts, in the order of PARTS."""
    made: Mapping[str, Mapping[str, Callable[[], Figures]]] = {
        "peak": {
            f"{name}, {dtype}": partial(peak, plan, shapes, dtype)
            for dtype in dtypes(plan.device)
            for name, shapes in products(plan.encoder, plan.square, plan.rows)
        },
        "families": {family: partial(agreement, plan, family) for family in SHAPES},
        "encoder": {
            "form": partial(chosen, plan),
            **{f"{tokens} tokens": partial(speed, plan, tokens, batch) for tokens, batch in plan.batches},
            "alone": partial(speed, plan, _TOKENS, 1),
        },
        "generation": {f"{rows} row{'s' if rows > 1 else ''}": partial(step, plan, rows) for rows in ROWS},
        "service": {"under load": partial(service, plan)},
    }
    for part in PARTS:
        if part in parts:
            yield from (Task(part, name, run) for name, run in made[part].items())


def find_device(wanted: str) -> Figures:
    """The device to check, what is known of it, and the libraries. `wanted`: "auto" takes an NPU before a GPU."""
    from importlib.metadata import PackageNotFoundError, version

    found: Figures = {"device": wanted, "libraries": {}}
    if wanted == "auto":
        torch = import_torch("cpu")
        found["device"] = "cuda:0" if torch.cuda.is_available() else "cpu"
        if any(Path("/dev").glob("davinci[0-9]*")):
            found["device"] = "npu:0"
    kind = found["device"].partition(":")[0]
    torch = import_torch(found["device"])
    if kind != "cpu":
        backend = getattr(torch, kind)
        about = backend.get_device_properties(found["device"])
        found |= {"name": backend.get_device_name(found["device"]), "count": backend.device_count()}
        found["memory_gib"] = round(about.total_memory / 2**30, 1)
    if kind == "cuda":
        found |= {"capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda}
    for package in ("torch", "torch_npu", "transformers", "tokenizers", "ray", "numpy"):
        try:
            found["libraries"][package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def dtypes(device: str) -> tuple[str, ...]:
    """The formats whose peak is of interest."""
    return ("float32", quick_cpu_dtype()[0]) if device == "cpu" else ("bfloat16", "float16")


def peak(plan: Plan, shapes: tuple[int, int, int], dtype: str) -> Figures:
    import_torch(plan.device).set_num_threads(_threads())
    return {"dtype": dtype, "size": list(shapes), **product_speed(shapes, plan.device, plan.least_s, dtype)}


def agreement(plan: Plan, family: str) -> Figures:
    """Of a tiny random model: the form that is chosen and why, and how well the packed form agrees with the model's own
    code in float32, by the smallest cosine: `exact` in float32 too, `cosine` in the format `narrow`.
    """
    from deployments.engines.pooled_model import probe_batch, tolerance

    shape = SHAPES[family].tiny()
    with tempfile.TemporaryDirectory(dir=plan.scratch) as folder, _warnings() as warned:
        write_family(shape, Path(folder))
        card = read_model_card(ModelSettings(id=folder, pooling=shape.pooling))
        engine = TorchEngine(card, plan.settings(), plan.device, _threads())
        ids = TokenBatch.random(card.vocab_size, [_TOKENS], seed=0)
        alone = seconds_of(lambda: embed(engine, ids, threading.Event()), plan.least_s / 4)
        found = {**_described(engine), "alone_ms": 1000 * statistics.median(alone), "warnings": warned}
        engine.use("padded", "float32")
        reference = embed(engine, probe_batch(card), threading.Event())
        narrow = engine.info.dtype if engine.info.dtype != "float32" else "bfloat16"
        like, cosines = tolerance(card), []
        for dtype in ("float32", narrow):
            engine.use("packed", dtype)
            cosines.append(like.of(reference, embed(engine, probe_batch(card), threading.Event())))
    agrees = all(cosine >= like.least for cosine in cosines)  # NaN does not
    return found | {"exact": cosines[0], "narrow": narrow, "cosine": cosines[1], "agrees": agrees}


def chosen(plan: Plan) -> Figures:
    """The encoder's form and why it was chosen."""
    engine, _, warned = _encoder(plan)
    return {**_described(engine), "shape": plan.encoder_name, "warnings": warned}


def speed(plan: Plan, tokens: int, batch: int) -> Figures:
    """The encoder's speed from token ids to vectors in the host's memory."""
    engine, card, _ = _encoder(plan)
    ids = TokenBatch.random(card.vocab_size, [tokens] * batch, seed=0)
    seconds = seconds_of(lambda: embed(engine, ids, threading.Event()), plan.least_s)
    about = {"tokens": tokens, "batch": batch, "dtype": engine.info.dtype}
    return about | rates(seconds, batch, tokens, plan.encoder.operations(tokens))


def step(plan: Plan, rows: int) -> Figures:
    """A step of generation that adds a token to each of `rows` answers, the choice of the tokens included."""
    from deployments.generation.planned_steps import PlannedStep

    engine, card = _generator(plan)
    work = PlannedStep(rows, _CACHED).work(engine.blocks, card, block_size=engine.block_size)
    seconds = seconds_of(lambda: work.run(engine.steps), plan.least_s)
    taken = statistics.median(seconds)
    weights = card.model.parameters * (4 if engine.dtype == "float32" else 2)
    return {
        "shape": plan.causal.name,
        "dtype": engine.dtype,
        "why": engine.why,
        "rows": rows,
        "p50_ms": 1000 * taken,
        "tokens_s": rows / taken,
        "weights_gb_s": weights / taken / 1e9,
        "seconds": seconds,
    }


def service(plan: Plan) -> Figures:
    """See `service_load.measure`."""
    from calibration.devices.service_load import measure

    return measure(_encoder_folder(plan), plan.device, plan.texts, plan.clients, plan.load_s)


@cache
def _encoder(plan: Plan) -> tuple[Engine, ModelCard, list[str]]:
    card = read_model_card(ModelSettings(id=str(_encoder_folder(plan))))
    with _warnings() as warned:
        return create_engine(card, plan.settings(), plan.device, _threads()), card, warned


def _encoder_folder(plan: Plan) -> Path:
    folder = plan.scratch / "encoder"
    if not folder.exists():
        write_bert(plan.encoder, folder)
    return folder


@cache
def _generator(plan: Plan) -> tuple[Any, Any]:
    """The engine and the model's card."""
    from deployments.generation.engine.factory import create_step_engine
    from deployments.generation.scheduler.block_pool import BLOCK, blocks_of
    from deployments.generation.settings import GenerationAcceleratorSettings, GenerationCpuSettings
    from deployments.generation.text.model_card import read_generation_card

    folder = plan.scratch / "causal"
    if not folder.exists():
        write_causal(plan.causal, folder)
    card = read_generation_card(ModelSettings(id=str(folder), max_tokens=_CONTEXT))
    kind = GenerationCpuSettings if plan.device == "cpu" else GenerationAcceleratorSettings
    blocks = max(ROWS) * blocks_of(_CACHED + 1, BLOCK)
    return create_step_engine(card, kind(blocks=blocks), plan.device, _threads()), card


def _described(engine: Engine) -> Figures:
    info = engine.info
    form = engine.form if isinstance(engine, TorchEngine) else info.engine
    return {"form": form, "engine": info.engine, "dtype": info.dtype, "why": info.why}


def _threads() -> int:
    return read_cpu_shape().usable


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the engines warn of meanwhile, such as a form that is left out."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("ray.serve"), Kept(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
