"""The one exception of this package."""


class MiniError(Exception):
    """Something the user can act on; its text is the whole message."""
