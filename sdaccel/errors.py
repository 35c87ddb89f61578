"""Every error that sdaccel raises on purpose.

SdaccelError
├── SettingError      a setting or option has a value we cannot use
├── ProfileError      a profile cannot be parsed, or none contains the shape asked for
├── ModelError        a checkpoint cannot be opened
│   └── PickleRefused     it would need unpickling, which is off by default
├── ExportError       a component cannot be turned into a graph, or the graph disagrees with torch
├── StoreError        the engine store cannot do what was asked
│   ├── EngineNotFound    no such engine
│   └── EngineBroken      files are missing, changed or unsafe
├── BackendError      a backend cannot build, load or run an engine
│   └── OutOfMemory       there is too little memory on the GPU now; later there may be enough
├── UnsupportedCall   a host asks for something that an engine cannot do (the reason for a fallback)
└── Cancelled         the user stopped a long task
"""


class SdaccelError(Exception):
    """Base of the tree. ``hint`` is the next command or setting to try, already part of the message."""

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__(f"{message} {hint}" if hint else message)
        self.hint = hint


class SettingError(SdaccelError, ValueError):
    pass


class ProfileError(SdaccelError, ValueError):
    pass


class ModelError(SdaccelError):
    pass


class PickleRefused(ModelError):
    pass


class ExportError(SdaccelError):
    pass


class StoreError(SdaccelError):
    pass


class EngineNotFound(StoreError, LookupError):
    pass


class EngineBroken(StoreError):
    pass


class BackendError(SdaccelError):
    pass


class OutOfMemory(BackendError):
    pass


class UnsupportedCall(SdaccelError):
    pass


class Cancelled(SdaccelError):
    pass
