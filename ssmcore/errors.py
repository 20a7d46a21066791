"""Every error a user of ssmcore can meet.

Each class says one kind of fault; its message names the offending value and what to do. Errors of a
step carry a stable `code` and the row, because tools read them as JSON. Nothing here recovers.
"""

from __future__ import annotations


class SsmcoreError(Exception):
    """Base of all errors that ssmcore raises on purpose. `code` is stable, for programs to read."""

    code = "error"


class SettingsError(SsmcoreError):
    """A setting is unknown, has the wrong type, or a value that cannot be."""

    code = "settings"


class UnknownOptionError(SettingsError):
    """A key that no setting and no option of the chosen strategy has."""

    code = "unknown_option"


class PluginError(SsmcoreError):
    """A plugin could not be loaded, or offers something that is not a strategy."""

    code = "plugin"


class UnknownStrategyError(PluginError):
    """No installed plugin offers a strategy of that name for that slot."""

    code = "unknown_strategy"


class DuplicateStrategyError(PluginError):
    """Two distributions offer a strategy of the same name for the same slot."""

    code = "duplicate_strategy"


class UnavailableError(SsmcoreError):
    """The chosen strategy cannot run on this machine; the message says what to install."""

    code = "unavailable"


class CombinationError(SettingsError):
    """Two settings that cannot work together; the message names both and what works instead."""

    code = "combination"


class StepError(SsmcoreError):
    """A scheduled step that no plan can be made for.

    Attributes:
        code: which rule the step breaks, one of the codes listed in `docs/steps.md`.
        row: the first offending row, or None when the fault is not one row's.
    """

    def __init__(self, code: str, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.row = row


class CapacityError(SsmcoreError):
    """Memory or slots do not suffice; the message names the largest value that fits."""

    code = "capacity"


class CheckpointError(SsmcoreError):
    """A model directory that is not a Mamba-2 model, or whose tensors do not match its config."""

    code = "checkpoint"


class RequestError(SsmcoreError):
    """One request that cannot be served (empty prompt, too long, bad parameter); others go on."""

    code = "request"


class TraceError(SsmcoreError):
    """A serving trace that cannot be read; the message names the file and the line."""

    code = "trace"
