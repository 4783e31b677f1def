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
    """The message of an error of another library, in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, (KeyError, IndexError)) or not text:
        text = f"{type(error).__name__} {text}".strip()
    return text[:most]


class KeepgradError(Exception):
    """The base class of every error that keepgrad raises on purpose."""


class ConfigError(KeepgradError, ValueError):
    """A setting has a value that cannot work, for any model or for this one."""


class NoSiteError(KeepgradError, ValueError):
    """The model has no branch that keepgrad knows how to train with kept positions only."""


class AlreadyAppliedError(KeepgradError, RuntimeError):
    """`apply` was called on a model that keepgrad already changed."""


class NotAppliedError(KeepgradError, RuntimeError):
    """`remove` or `exact` was called on a model that keepgrad has not changed."""


class InputError(KeepgradError, ValueError):
    """An argument or an input of the model is wrong."""


class MapTooSmallError(InputError):
    """A feature map is smaller than one group of the mask."""


class BudgetError(KeepgradError):
    """Nothing fits the memory budget; the message says how much would be needed."""


class CheckpointingError(KeepgradError):
    """The model has no checkpointing of its own that works."""


class FileError(KeepgradError):
    """A file cannot be written, or its content is wrong. Nothing that was there is lost."""


class DivergedError(KeepgradError):
    """The loss has become NaN or infinite."""


class StoppedError(KeepgradError):
    """A signal ended a training run between two steps. The run can be resumed."""


class StoppedElsewhereError(StoppedError):
    """Another process of the training run stopped, so this one stopped too. The other process says why."""


class UnsupportedByTorchError(KeepgradError, AttributeError):
    """A feature of torch cannot be used on a patched model. The message says what to use instead.

    It is an AttributeError too, because it may be raised when an attribute is looked up.
    """
