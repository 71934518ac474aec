"""Addresses of a cloud as people write them, checked and looked up; no sockets of ours, no ZeroMQ.

An address is `tcp://HOST:PORT`; the `tcp://` may be left out. HOST is a name, an IPv4 address, or an IPv6 address in
brackets. A cloud may also bind to `*` (every interface) and to port 0 or `*` (any free port).
"""

from __future__ import annotations

import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from pipesd.errors import Unreachable, UsageError

EXAMPLE_PORT = 7421

# Called as socket.getaddrinfo(host, port, type=SOCK_STREAM); an argument so that a test can play the name server.
Resolver = Callable[..., Sequence[tuple[Any, Any, int, str, tuple[Any, ...]]]]

_LABEL = r"[^\W_](?:[\w-]{0,61}[^\W])?|[^\W_]"  # letters of any script: names may be international
_NAME = re.compile(rf"(?:(?:{_LABEL}|_[\w-]{{1,62}})\.)*(?:{_LABEL})\.?")


class Reach(StrEnum):
    """What a plain TCP connection to an address meets."""

    OPEN = "open"  # something accepts connections there
    REFUSED = "refused"  # the machine answers, nothing listens
    FILTERED = "filtered"  # no answer at all: firewall, wrong address, machine down
    UNKNOWN_HOST = "unknown host"  # the name has no address


def parse_address(text: str, *, bind: bool = False) -> str:
    """The address in its one spelling, `tcp://host:port`. With `bind` also `*` for the host, `*` or 0 for the port.

    Raises `UsageError` with a right example for anything else; no name is looked up.
    """
    host, port = split_address(text, bind=bind)
    return join_address(host, port)


def join_address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_address(text: str, *, bind: bool = False) -> tuple[str, int]:
    """(host without brackets, port) of an address; port 0 means any free one. Raises as `parse_address`."""
    given = text.strip()
    scheme, separator, rest = given.rpartition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    host, port_text = _split_port(authority)
    bracketed = authority.startswith("[")
    example = _example("::1" if bracketed and not _is_ipv6(host) else host, port_text, bind)
    if not given:
        raise UsageError(f"the address is empty; write for example {example}")
    if separator and scheme.lower() != "tcp":
        raise UsageError(f"address {text!r}: {scheme}:// is not spoken here, only tcp://; write for example {example}")
    if authority != rest:
        raise UsageError(f"address {text!r}: only a host and a port can be given; write for example {example}")
    if ":" in host and not bracketed:
        raise UsageError(f"address {text!r}: an IPv6 address stands in brackets; write for example {example}")
    _check_host(text, host, bracketed=bracketed, bind=bind, example=example)
    if port_text is None:
        raise UsageError(f"address {text!r} has no port; write for example {example}")
    return host, _checked_port(text, port_text, bind=bind, example=example)


def is_loopback(address: str, resolve: Resolver = socket.getaddrinfo) -> bool:
    """Whether only this machine can reach the address; a name must lead to loopback addresses alone."""
    host, port = split_address(address, bind=True)
    if host == "*":
        return False
    try:
        return all(ipaddress.ip_address(ip).is_loopback for ip in _look_up(host, port, resolve))
    except Unreachable:
        return False


def candidates(address: str, resolve: Resolver = socket.getaddrinfo) -> tuple[str, ...]:
    """The numeric addresses behind an address, in the system's order of preference, `tcp://1.2.3.4:5` or `tcp://[::1]:5`.

    Raises `Unreachable` when the name has none.
    """
    host, port = split_address(address, bind=True)
    return tuple(join_address(ip, port) for ip in _look_up(host, port, resolve))


def reach(address: str, timeout_s: float = 1.0, resolve: Resolver = socket.getaddrinfo) -> Reach:
    """Tries a plain TCP connection, to tell a user why there is no answer. Takes at most about `timeout_s`."""
    try:
        endpoints = candidates(address, resolve)
    except Unreachable:
        return Reach.UNKNOWN_HOST
    deadline_s = time.monotonic() + timeout_s
    seen = Reach.FILTERED
    for left, endpoint in zip(range(len(endpoints), 0, -1), endpoints, strict=True):
        share_s = max((deadline_s - time.monotonic()) / left, 0.05)
        try:
            socket.create_connection(split_address(endpoint), timeout=share_s).close()
            return Reach.OPEN
        except ConnectionError:
            seen = Reach.REFUSED
        except OSError:
            continue  # timed out or no route: stays filtered unless another address refuses
    return seen


def _split_port(authority: str) -> tuple[str, str | None]:
    """(host, port text or None), without judging either."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", authority)
    if bracketed:
        return bracketed[1], bracketed[2]
    host, separator, port_text = authority.rpartition(":")
    if not separator:
        return authority, None
    if ":" in host and not (_is_ipv6(host) and port_text.isascii() and port_text.isdigit() and len(port_text) > 3):
        return authority, None  # an IPv6 address without a port
    return host, port_text


def _example(host: str, port_text: str | None, bind: bool) -> str:
    """The address most likely meant, to be shown in an error."""
    usable = host if _is_ipv6(host) or (_NAME.fullmatch(host) and not _looks_numeric(host)) or _is_ipv4(host) else ""
    if usable and not bind and _ip(usable) in (ipaddress.ip_address("0.0.0.0"), ipaddress.ip_address("::")):
        usable = ""
    good_port = port_text is not None and port_text.isascii() and port_text.isdigit() and 0 < int(port_text[:6]) < 65536
    return join_address(usable or "127.0.0.1", int(port_text) if good_port and port_text else EXAMPLE_PORT)


def _check_host(text: str, host: str, *, bracketed: bool, bind: bool, example: str) -> None:
    if not host:
        raise UsageError(f"address {text!r} has no host; write for example {example}")
    if bracketed:
        if not _is_ipv6(host):
            raise UsageError(f"address {text!r}: {host!r} is not an IPv6 address; write for example {example}")
    elif host == "*":
        if not bind:
            raise UsageError(f"address {text!r}: '*' is only for a cloud to bind to; write for example {example}")
    elif _looks_numeric(host):
        if not _is_ipv4(host):
            raise UsageError(f"address {text!r}: {host!r} is not an IPv4 address; write for example {example}")
    elif len(host) > 253 or not _NAME.fullmatch(host):
        raise UsageError(f"address {text!r}: {host!r} is not a host; write for example {example}")
    ip = _ip(host)
    if ip is not None and ip.is_unspecified and not bind:
        raise UsageError(
            f"address {text!r}: {host} means every interface of the cloud's machine and can only be bound;"
            f" give that machine's name or address, on the same machine {example}"
        )


def _checked_port(text: str, port_text: str, *, bind: bool, example: str) -> int:
    if bind and port_text in ("*", "0"):
        return 0
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and 0 < int(port_text) < 65536):
        raise UsageError(
            f"address {text!r}: the port is a number from 1 to 65535, not {port_text!r}; write for example {example}"
        )
    return int(port_text)


def _look_up(host: str, port: int, resolve: Resolver) -> list[str]:
    if _ip(host) is not None:
        return [host]
    try:
        found = resolve(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(
            f"the host {host!r} has no address ({error}); check the name, or give a number such as "
            f"{join_address('127.0.0.1', port or EXAMPLE_PORT)}"
        ) from None
    return list(dict.fromkeys(entry[4][0] for entry in found if entry[0] in (socket.AF_INET, socket.AF_INET6)))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_ipv4(host: str) -> bool:
    return isinstance(_ip(host), ipaddress.IPv4Address)


def _is_ipv6(host: str) -> bool:
    return isinstance(_ip(host), ipaddress.IPv6Address)


def _looks_numeric(host: str) -> bool:
    return re.fullmatch(r"[0-9.]+", host) is not None
