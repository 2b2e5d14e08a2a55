"""Errors meant for a person: one line that names the key or the item at fault."""


class HarnessError(ValueError):
    """Anything a user can cause. The command line prints it as one line and exits with status 2."""


class ConfigError(HarnessError):
    """A configuration value is unknown, of the wrong type, or out of range; the message starts with its key."""


class RingError(HarnessError):
    """An operation the ring/checkpoint state model forbids; the message names the slot."""


class InputError(HarnessError):
    """Token data outside the model's domain; the message names the token and the head."""
