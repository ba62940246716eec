"""The errors that minillm raises on purpose. Each message says what was wrong and what to do."""


class MinillmError(Exception):
    """Base of all errors that a user can cause and mend. The command line prints it as one sentence, exit code 2."""


class ModelError(MinillmError):
    """A model's name, file, configuration or weights cannot be used."""


class RequestError(MinillmError, ValueError):
    """A request (prompt or sampling parameters) is refused. Other requests go on."""
