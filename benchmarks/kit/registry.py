"""The comparisons by name. A new one is a module with the functions of `Comparison`, and a line here."""

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from benchmarks.kit.bench import Bench, Found
from benchmarks.kit.goal import Goal
from benchmarks.kit.sheet import Sheet

ABOUT = {
    "path": "windve with 1 to 4 Routers over an engine that does nothing, against a bare ingress and Serve's defaults",
    "service": "windve on the CPU against Infinity, mosec, LitServe and @serve.batch: same weights, same texts",
    "engine": "engines and number formats alone, by batch and length, against what the cores can multiply; memory",
    "families": "packed against the model's own code, for each family at the shape of its smallest public model",
    "promise": "late answers and goodput of whole services under bursts and streams, up to three times capacity",
    "overload": "windve and its peers from 0.3 to 3 times the load that each can take, timed at the client",
    "door": "windve and its peers up to 10 times their capacity, whether the device or the Router is short",
    "overflow": "a peak that overflows to the CPU and goes, as Prometheus and the dashboard's panels see it",
    "admission": "admission by predicted finish in virtual time, beside the paper's depths and the plain rules",
    "zoo": "the promise on devices that no cost model describes, in virtual time, beside an oracle",
    "rules": "each rule of admission, order, placing, retries and learning off by itself, in virtual time",
    "scaling": "from one box to 256 nodes: Routers and queues in virtual time, and a Router that dies",
    "generation": "generation in virtual time: first tokens and paces that are kept, and goodput beside a bound",
    "hybrid": "a host that holds a part of the cache, in virtual time: each mode beside the model and no host",
    "streams": "generation at true speed on real Ray: late first tokens and paces, goodput beside virtual time's",
    "decoding": "answers of a language model on the CPU: tokens/s beside transformers, OpenVINO and vLLM",
    "gpu": "windve on an NVIDIA GPU: its engine against the card's own peak and sentence-transformers",
}
OPTIONAL = {"gpu", "overflow"}  # left out of a run of all if the device, or Prometheus, is missing


class Comparison(Protocol):
    """The functions of a comparison's module. Only `run` measures; the others work on saved results. A module may also
    have `plot(found)`, if a picture shows more than the tables.
    """

    def run(self, bench: Bench) -> None:
        """Measure, and save samples with `bench.sample`. Raises NotAvailable if that is not possible here."""

    def sheets(self, found: Found) -> Sequence[Sheet]: ...

    def goals(self, found: Found) -> Sequence[Goal]: ...


def comparison(name: str) -> Comparison:
    return cast("Comparison", importlib.import_module(f"benchmarks.comparisons.{name}"))
