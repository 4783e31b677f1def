"""The exceptions keepgrad raises. Each message says what was given, what was expected and what to do."""

__all__ = [
    "AlreadyAppliedError",
    "BudgetError",
    "CheckpointingError",
    "ConfigError",
    "DivergedError",
    "FileError",
    "InputError",
    "KeepgradError",
    "MapTooSmallError",
    "NoSiteError",
    "NotAppliedError",
    "StoppedElsewhereError",
    "StoppedError",
    "UnsupportedByTorchError",
    "reason_of",
]


def reason_of(error: BaseException, most: int = 300) -> str:
    """What an error of another library says, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (KeyError, IndexError)) or not text:
        text = f"{type(error).__name__} {text}".strip()
    return text[:most]


class KeepgradError(Exception):
    """Base of every error keepgrad raises on purpose."""


class ConfigError(KeepgradError, ValueError):
    """A setting has a value that cannot work, for any model or for this one."""


class NoSiteError(KeepgradError, ValueError):
    """The model has no branch that keepgrad knows how to train with kept positions only."""


class AlreadyAppliedError(KeepgradError, RuntimeError):
    """`apply` was called on a model that keepgrad already changed."""


class NotAppliedError(KeepgradError, RuntimeError):
    """`remove` or `exact` was called on a model that keepgrad has not changed."""


class InputError(KeepgradError, ValueError):
    """An input does not fit."""


class MapTooSmallError(InputError):
    """A feature map is smaller than one group of the mask."""


class BudgetError(KeepgradError):
    """Nothing fits the memory budget; the message says how much would be needed."""


class CheckpointingError(KeepgradError):
    """The model cannot be checkpointed by its own means."""


class FileError(KeepgradError):
    """A file cannot be written, or is not what it should be; nothing that was there is lost."""


class DivergedError(KeepgradError):
    """The loss is no finite number any more."""


class StoppedError(KeepgradError):
    """A signal ended a training run between two steps; it can be resumed."""


class StoppedElsewhereError(StoppedError):
    """Another process of a training run stopped, and this one with it; that one says why."""


class UnsupportedByTorchError(KeepgradError, AttributeError):
    """Something of torch cannot be used on a patched model; the message says what to use instead.

    It is an AttributeError too, for it may be the answer to a question for an attribute.
    """
