"""The two exceptions that the command line reports without a traceback."""


class UserError(ValueError):
    """A mistake the user can mend; its message is one sentence that says how."""


class Stopped(Exception):
    """Work that was asked to stop by a signal and has saved its state first."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number  # as a shell counts processes that end by a signal
