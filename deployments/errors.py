"""The error tree. Each error has an HTTP status and a gRPC status. Only the edge turns an error into a response.

WindveError
├── SettingsError           refuses to start; names the key
├── InvalidInput            400  INVALID_ARGUMENT     the client must change the request
│   ├── EmptyInput          400  INVALID_ARGUMENT
│   ├── UnknownModel        404  NOT_FOUND
│   ├── BodyTooLarge        413  INVALID_ARGUMENT
│   ├── Compressed          415  INVALID_ARGUMENT     the body is compressed
│   └── ContextExceeded     400  INVALID_ARGUMENT     prompt and answer together exceed the model's context
├── Unauthorized            401  UNAUTHENTICATED      the request has no API key, or an unknown one
├── WrongKind               400  FAILED_PRECONDITION  the route needs another kind of model
├── WrongSpace              409  FAILED_PRECONDITION  the client expects another space
├── Busy                    429  RESOURCE_EXHAUSTED   no replica has room before the deadline; says when to come back
│   ├── OverShare           429  RESOURCE_EXHAUSTED   and the API key asks for more than its fair share
│   └── OverQuota           429  RESOURCE_EXHAUSTED   the API key's quota is used up, whether or not there is room
├── DeadlineExceeded        504  DEADLINE_EXCEEDED    the deadline has passed, or not even an idle device could meet it
├── Defect                  500  INTERNAL             an unexpected exception; its traceback is in the log
├── EngineFailed            500  FAILED_PRECONDITION  the model run failed
│   └── EngineBroken        500  FAILED_PRECONDITION  perhaps not because of the query; the Router tries another replica
└── Unavailable             503  UNAVAILABLE          no pool can answer now
    ├── ReplicaLost         503  UNAVAILABLE          the replica died with the query; the Router tries once more
    └── TimedOut            503  DEADLINE_EXCEEDED    the time that the settings allow has passed

These are the statuses on OpenAI's and Cohere's routes. All other routes use TEI's: `serve_app/web/errors.py`.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class WindveError(Exception):
    """Root of all errors that windve raises on purpose. The message is one plain sentence for its reader."""

    status = 500
    grpc_status = "INTERNAL"
    code = "internal_error"
    is_counted = False  # in the metrics

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


def is_ours(error: BaseException) -> bool:
    """Whether the server is at fault, as HTTP's statuses from 500 on say: of any error that is no WindveError, too."""
    return not isinstance(error, WindveError) or error.status >= WindveError.status


class SettingsError(WindveError):
    """A setting is wrong, and the application refuses to start. The message begins with the key."""

    code = "bad_settings"

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}", param=key)
        self.key = key
        self.problem = problem

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, str]]:
        """Keep both arguments, so that the error can be pickled on its way from a replica."""
        return type(self), (self.key, self.problem)


def not_finite(pool: str, model: str, dtype: str) -> SettingsError:
    """The error for a model whose numbers are not finite in that number format. `pool`: its key in the settings."""
    if dtype == "float32":
        return SettingsError("args.model.id", f"{model} computes numbers that are not finite in float32")
    remedy = "set it to auto, which takes a format that agrees with float32, or to float32"
    problem = f"{model} computes numbers that are not finite in {dtype}: {remedy}"
    return SettingsError(f"args.{pool}.dtype", problem)


class InvalidInput(WindveError):
    status = 400
    grpc_status = "INVALID_ARGUMENT"
    code = "invalid_input"


class EmptyInput(InvalidInput):
    code = "empty_input"


class UnknownModel(InvalidInput):
    status = 404
    grpc_status = "NOT_FOUND"
    code = "model_not_found"


class BodyTooLarge(InvalidInput):
    status = 413
    code = "body_too_large"


class Compressed(InvalidInput):
    status = 415
    code = "compressed"


class ContextExceeded(InvalidInput):
    code = "context_length_exceeded"  # OpenAI's code: clients know it and shorten the prompt


class Unauthorized(WindveError):
    status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class WrongKind(WindveError):
    status = 400
    grpc_status = "FAILED_PRECONDITION"
    code = "wrong_model_kind"


class WrongSpace(WindveError):
    status = 409
    grpc_status = "FAILED_PRECONDITION"
    code = "wrong_space"


class Busy(WindveError):
    """Busy, as in Algorithm 1. `retry_after_s`: seconds until the client should try again."""

    status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    code = "busy"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverShare(Busy):
    code = "over_share"


class OverQuota(Busy):
    code = "over_quota"


class DeadlineExceeded(WindveError):
    status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    code = "deadline_exceeded"


class Defect(WindveError):
    """An exception that is none of these: a bug in windve."""


class EngineFailed(WindveError):
    grpc_status = "FAILED_PRECONDITION"  # as TEI has it
    code = "engine_failed"


class EngineBroken(EngineFailed):
    """The engine, not the query, is at fault, or may be: another replica may answer."""


class Unavailable(WindveError):
    status = 503
    grpc_status = "UNAVAILABLE"
    code = "unavailable"


class ReplicaLost(Unavailable):
    code = "replica_lost"


class TimedOut(Unavailable):
    grpc_status = "DEADLINE_EXCEEDED"
    code = "timed_out"
