"""Engines of models in folders: in float32 on one core, unless a test says otherwise."""

import threading

import numpy as np

from deployments.engines import TokenBatch, create_engine, embed
from deployments.models.model_files import read_model_card
from deployments.settings import CpuSettings, ModelSettings

FORMS = ("packed", "padded")
NEVER = threading.Event()


def card_of(folder, **settings):
    return read_model_card(ModelSettings(id=str(folder), **settings))


def engine_of(card, *, form=None, threads=1, **settings):
    """An engine in this `form`, or in the faster one."""
    settings = CpuSettings(**{"dtype": "float32"} | settings)
    engine = create_engine(card, settings, "cpu", threads)
    if form is not None:
        engine.use(form, settings.dtype)
    return engine


def rows_of(engine, queries, output="text"):
    """The results of these queries in one batch."""
    return embed(engine, TokenBatch.pack(queries, (output,)), NEVER)


def check_rows(engine, queries, wanted, output="text", **close):
    """Check that these queries give the `wanted` arrays, in one batch and each alone."""
    np.testing.assert_allclose(rows_of(engine, queries, output), np.concatenate(wanted), **close)
    for query, rows in zip(queries, wanted, strict=True):
        np.testing.assert_allclose(rows_of(engine, [query], output), rows, **close)
