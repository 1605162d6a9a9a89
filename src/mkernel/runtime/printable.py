"""Text from files and from other processes, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, with unprintable characters escaped.

    These are control characters (which can make a terminal do anything), line breaks, marks that reverse the writing
    direction, and zero-width characters: everything that `repr` escapes, except for quotes and backslashes.
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
