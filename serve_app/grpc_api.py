"""TEI's gRPC calls, and the standard health check. All that carry queries end in `Router.embed`, as in `http_api.py`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from ray.serve.grpc_util import RayServegRPCContext

from deployments.errors import Busy, InvalidInput, Unavailable, WindveError
from deployments.router import Embedded, Router
from serve_app.grpc_services import SERVICES
from serve_app.http_api import describe, shape_vectors
from serve_app.proto import tei_pb2
