"""Client libraries that call nobody but this machine."""

import asyncio
import contextlib
import gc
import importlib.util
import socket
import sys
import traceback
import warnings
from pathlib import Path

import pytest

HERE = {"127.0.0.1", "::1", "localhost"}
QUIET = {  # each client's own switch
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "ANONYMIZED_TELEMETRY": "False",  # chromadb
    "LANGSMITH_TRACING": "false",
}


@contextlib.contextmanager
def only_loopback():
    """Telemetry is off, and whoever calls another machine meanwhile is named at the end, threads included.

    The vocabulary that tiktoken would download lies in litellm's package; tiktoken checks its hash.
    """
    called = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in HERE:
            called.append((address, traceback.format_stack()))
            raise ConnectionRefusedError(f"{address} is not this machine")
        return connect(self, address)

    def guarded_look_up(host, *rest, **more):
        if host not in HERE:
            called.append((host, traceback.format_stack()))
            raise socket.gaierror(f"{host} is not this machine")
        return look_up(host, *rest, **more)

    litellm = Path(importlib.util.find_spec("litellm").origin).parent
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        runner.get_loop()  # litellm leaves tasks on the one that it finds: here they end
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("TIKTOKEN_CACHE_DIR", str(litellm / "litellm_core_utils" / "tokenizers"))
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)  # its switch was read at import
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_look_up)
        yield
        for module in sys.modules.keys() & {"litellm"}:
            sys.modules[module].in_memory_llm_clients_cache.flush_cache()
        with warnings.catch_warnings():  # what the clients leave open is theirs, and not for the next test
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
    assert not called, "\n".join(f"{whom} was called from:\n{''.join(stack)}" for whom, stack in called)
