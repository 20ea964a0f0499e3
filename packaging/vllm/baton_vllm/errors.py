"""A refusal in the words of the node protocol (`EngineError` in schemas/src/error.rs): its kind decides what the caller does."""

STATUS = {
    "context_overflow": 400,
    "invalid_request": 400,
    "unauthorized": 401,
    "unsupported": 501,
    "queue_full": 503,
    "unavailable": 503,
    "gave_way": 503,
    "internal": 500,
}


class NodeError(Exception):
    """An error that is sent to the caller. Its texts have no paths, addresses or keys."""

    def __init__(self, kind, **fields):
        super().__init__(fields.get("message") or fields.get("reason") or fields.get("feature") or fields.get("detail") or kind)
        self.kind = kind
        self.body = {"kind": kind, **fields}

    @property
    def status(self):
        return STATUS[self.kind]


class Unsupported(Exception):
    """Why the model's KV cannot be handed over, in words for the operator."""


def invalid(message):
    return NodeError("invalid_request", message=message)


def unavailable(reason):
    return NodeError("unavailable", reason=reason)


def unsupported(feature):
    return NodeError("unsupported", feature=feature)
