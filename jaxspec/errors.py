"""Every error that a user or a client can meet. One line each: what was expected, what came, where."""


class JaxspecError(Exception):
    """Base of all errors raised on purpose by this project."""


class UserError(JaxspecError, ValueError):
    """A user's mistake, told in one clear line. Command lines exit with status 2."""


class InvalidRequest(UserError):
    """A request field outside its allowed range. Servers answer INVALID_ARGUMENT."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        super().__init__(f"{field}: expected {expected}, got {shown}")
        self.field = field
        self.value = value
        self.expected = expected


class QueueFull(JaxspecError):
    """The waiting queue is at its limit. Servers answer RESOURCE_EXHAUSTED with retry info."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(f"queue full: {waiting} of {limit} requests wait; retry in {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class Unavailable(JaxspecError):
    """The engine is draining or stopped and takes no new requests."""


class EngineFault(JaxspecError):
    """The engine could not finish a request through no fault of the client. Servers answer INTERNAL."""
