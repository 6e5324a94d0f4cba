"""The one error of this room: something about a model, a text or a trace that its user can put right."""


class TraceError(ValueError):
    """A trace that cannot be made or read. The message says what is wrong and what to do, in one line."""
