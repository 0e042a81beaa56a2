"""Where rank 0 listens, and how the other ranks learn of it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import warnings

import msgspec

from hyper_ckpt.errors import PlatformError, RankFailedError

LISTEN_VARIABLE = "HYPER_CKPT_LISTEN"
"""Environment variable of rank 0: the address to listen on, where that is not the one that it tells the others."""
_BACKLOG = 4096
# Of documentation: no host has them, so that their route is the one to all other networks.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


class Address(msgspec.Struct, frozen=True):
    """What a rank must know to connect. The token is secret: it lets its holder read and change all values."""

    host: str
    port: int
    token: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))

    def __repr__(self) -> str:
        return f"Address({self.host!r}, {self.port})"

    def encoded(self) -> bytes:
        """As ASCII, to be sent to the other ranks."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> Address:
        """The address that `encoded` made.

        Raises:
            RankFailedError: it is none.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RankFailedError("what rank 0 told of its key-value store is no address", [0]) from error


def is_loopback(host: str) -> bool:
    """Whether a name or address says by itself that it is this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(peer: str | None) -> str:
    """An address of this host that the others can reach: the one that talks to `peer`, which they reach as well.

    The loopback address only if `peer` names it. Many hosts take their own name for it: then the address that talks
    to other networks.
    """
    peer = peer or socket.gethostname()
    found = _address_towards(peer)
    if found and (not is_loopback(found) or is_loopback(peer)):
        return found
    return next(filter(None, map(_address_towards, _ELSEWHERE)), found or socket.gethostname())


def _address_towards(peer: str) -> str | None:
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    return None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `host`, or on what HYPER_CKPT_LISTEN says instead.

    Raises:
        PlatformError: this process cannot listen there.
    """
    chosen = os.environ.get(LISTEN_VARIABLE) or host
    failure: OSError | None = None
    try:
        found = socket.getaddrinfo(chosen, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        found, failure = [], error
    for family, _, _, _, address in found:
        both = address[0] == "::" and socket.has_dualstack_ipv6()
        try:
            listener = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            failure = failure or error
            continue
        if ipaddress.ip_address(address[0]).is_unspecified:
            warnings.warn(
                f"the key-value store of rank 0 listens on all interfaces ({chosen}): all that can reach this host "
                f"can try to connect, though not without the job's token. {LISTEN_VARIABLE} narrows it to one address",
                stacklevel=2,
            )
        return listener
    raise PlatformError(
        f"rank 0 cannot listen on {chosen!r}, port {port or 'any'}: {failure}. If the others reach this host under an "
        f"address that is not its own, set {LISTEN_VARIABLE} to the address on which to listen"
    ) from failure
