"""The error tree. Each error knows its HTTP status and its gRPC status; only the edge turns one into a response.

WindveError
├── SettingsError           refuses to start; names the key
├── InvalidInput            400  INVALID_ARGUMENT     the client must change the request
│   ├── EmptyInput          400  INVALID_ARGUMENT
│   ├── UnknownModel        404  NOT_FOUND
│   ├── BodyTooLarge        413  INVALID_ARGUMENT
│   └── ContextExceeded     400  INVALID_ARGUMENT     a prompt and its answer are longer than the model takes
├── Unauthorized            401  UNAUTHENTICATED      the request has no API key, or an unknown one
├── Forbidden               403  PERMISSION_DENIED    a trial without the secret of a calibration that runs
├── WrongKind               400  FAILED_PRECONDITION  the model is of another kind than the route needs
├── Busy                    429  RESOURCE_EXHAUSTED   no replica has room before the deadline; says when to come back
│   ├── OverShare           429  RESOURCE_EXHAUSTED   and the API key asks for more than its fair share
│   └── OverQuota           429  RESOURCE_EXHAUSTED   the API key's quota is used up; there may be room
├── DeadlineExceeded        504  DEADLINE_EXCEEDED    the client's own time has passed, or would on an idle device
├── Defect                  500  INTERNAL             nobody expected this exception; its traceback is in the log
├── EngineFailed            500  FAILED_PRECONDITION  the model run failed
│   └── EngineBroken        500  FAILED_PRECONDITION  whatever it is given; the Router tries once more elsewhere
└── Unavailable             503  UNAVAILABLE          no pool can answer now
    ├── ReplicaLost         503  UNAVAILABLE          the replica died with the query; the Router tries once more
    └── TimedOut            503  DEADLINE_EXCEEDED    the time that the settings allow has passed

These are the statuses of OpenAI's and Cohere's routes. On all others TEI's numbers count: `serve_app/web/errors.py`.
"""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says, on one line; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class WindveError(Exception):
    """Root of all errors that windve raises on purpose. Its text is one plain sentence for the person who reads it."""

    status = 500
    grpc_status = "INTERNAL"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class SettingsError(WindveError):
    """A setting is wrong: the application refuses to start, and the text begins with the key."""

    code = "bad_settings"

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}", param=key)
        self.key = key
        self.problem = problem

    def __reduce__(self) -> tuple[type[SettingsError], tuple[str, str]]:
        """Two arguments, so that the error survives the way from a replica (pickle)."""
        return type(self), (self.key, self.problem)


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


class ContextExceeded(InvalidInput):
    code = "context_length_exceeded"  # clients know OpenAI's word, and shorten


class Unauthorized(WindveError):
    status = 401
    grpc_status = "UNAUTHENTICATED"
    code = "invalid_api_key"


class Forbidden(WindveError):
    status = 403
    grpc_status = "PERMISSION_DENIED"
    code = "forbidden"


class WrongKind(WindveError):
    status = 400
    grpc_status = "FAILED_PRECONDITION"
    code = "wrong_model_kind"


class Busy(WindveError):
    """Algorithm 1's third answer. `retry_after_s`: seconds until a replica that was asked has room again."""

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
    """An exception that is none of these: a mistake of ours."""


class EngineFailed(WindveError):
    grpc_status = "FAILED_PRECONDITION"  # as TEI has it
    code = "engine_failed"


class EngineBroken(EngineFailed):
    """It fails with what it could answer before: not by the fault of a query."""


class Unavailable(WindveError):
    status = 503
    grpc_status = "UNAVAILABLE"
    code = "unavailable"


class ReplicaLost(Unavailable):
    code = "replica_lost"


class TimedOut(Unavailable):
    grpc_status = "DEADLINE_EXCEEDED"
    code = "timed_out"
