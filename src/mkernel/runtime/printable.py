"""Text from files and from other processes, as it may be shown on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, with every character that would not be seen as itself written as its escape.

    Those are control characters (with which a terminal can be told to do anything), line breaks, marks that reverse
    the direction of writing, and characters of no width: everything that `repr` escapes, except for quotes and
    backslashes.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
