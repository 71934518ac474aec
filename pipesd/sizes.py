"""Numbers of bytes and of things as a person reads them."""

from __future__ import annotations


def size_text(n_bytes: int) -> str:
    """Bytes in the unit that fits: "0.5 MB", "157 GB"."""
    return f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 10**9 else f"{n_bytes / 1e6:.3g} MB"


def counted(number: int, thing: str) -> str:
    """So many of a thing: "1 thread", "2 threads"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
