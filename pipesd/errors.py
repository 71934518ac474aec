"""The tree of errors under `PipeSDError`; each carries the exit code that the programs end with."""

from __future__ import annotations


class PipeSDError(Exception):
    """Anything that PipeSD reports to its user: one line that says what was got, what was wanted, what to do."""

    exit_code = 1


class UsageError(PipeSDError):
    """A value, a file or an option given by the caller cannot be used."""

    exit_code = 2


class Unreachable(PipeSDError):
    """The other side does not answer, or is lost for good."""

    exit_code = 3


class ProtocolError(PipeSDError):
    """The other side said something that the protocol does not allow."""

    exit_code = 3


class Refused(PipeSDError):
    """The cloud refused: a key, a version, a vocabulary or a limit. `code` is the wire's error code, if it came so."""

    exit_code = 4

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class VocabularyMismatch(Refused):
    """Draft and target do not give the same text to the same ids. `model` is the cloud's name for the target."""

    def __init__(self, text: str, code: int | None = None, model: str = "") -> None:
        super().__init__(text, code)
        self.model = model


class DrafterFailed(PipeSDError):
    """The draft model could not compute; its cache is empty, so a later try starts afresh."""


class Cancelled(PipeSDError):
    """The user interrupted."""

    exit_code = 130
