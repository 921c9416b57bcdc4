"""The two exceptions that the command line reports without a traceback."""


class UserError(ValueError):
    """An error that the user can fix; its message is one line that names the cause and the fix."""


class Stopped(Exception):
    """Work that was asked to stop by a signal and has saved its state first."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.code = 128 + number  # as a shell counts processes that end by a signal
