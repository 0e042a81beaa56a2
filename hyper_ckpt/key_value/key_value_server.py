"""The server of the key-value store: one thread in the process of rank 0, whatever the number of ranks."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Mapping

from hyper_ckpt.contracts.platform import KeyValueStore
from hyper_ckpt.errors import PlatformError
from hyper_ckpt.fork_safety import reset_in_children
from hyper_ckpt.key_value.addresses import Address, listen, own_address
from hyper_ckpt.key_value.in_process import InProcessKeyValueStore
from hyper_ckpt.key_value.server_loop import ServerLoop


class KeyValueServer(KeyValueStore):
    """The store as rank 0 has it, in its own memory, and as others reach it. It lives as long as this object.

    Args:
        host: name or address under which the others reach this host. It listens there and nowhere else, unless the
            environment says so (see `addresses.LISTEN_VARIABLE`).
        port: 0 takes a free one.
        token: what others must know to connect; None draws one.

    Raises:
        PlatformError: this process cannot listen there.
    """

    def __init__(self, host: str, port: int = 0, token: str | None = None) -> None:
        listener = listen(host, port)
        bound, port = listener.getsockname()[:2]
        self.address = Address(host, port) if token is None else Address(host, port, token)
        self.own_address: str = own_address(host) if bound in ("0.0.0.0", "::") else bound
        """This host's address towards the others."""
        self._store = InProcessKeyValueStore()
        self._loop = ServerLoop(listener, self._store, self.address.token.encode())
        thread = threading.Thread(target=self._loop.run, name="hyper-ckpt-key-value", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._loop.reset_after_fork()  # closes what is open
            raise PlatformError(f"rank 0 cannot start the thread of its key-value store: {error}") from error
        reset_in_children(self._loop)
        weakref.finalize(self, _end, self._loop, thread)

    def set_many(self, items: Mapping[str, bytes]) -> None:
        self._store.set_many(items)

    def get_many(self, keys: Collection[str], timeout: float = 0.0) -> dict[str, bytes]:
        return self._store.get_many(keys, timeout)

    def delete(self, *keys: str) -> None:
        self._store.delete(*keys)

    def delete_prefix(self, prefix: str) -> None:
        self._store.delete_prefix(prefix)

    def add(self, key: str, amount: int) -> int:
        """As `InProcessKeyValueStore.add`."""
        return self._store.add(key, amount)

    def keys(self) -> list[str]:
        """All keys that are set."""
        return self._store.keys()

    def close(self, patience: float = 0.0) -> None:
        """Ends the service when the other ranks have hung up, after at most `patience` seconds."""
        self._loop.wait_alone(patience)
        self._loop.stop()


def _end(loop: ServerLoop, thread: threading.Thread) -> None:
    loop.stop()
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):  # in a forked child there is no such thread
            thread.join(_ENDING_SECONDS)


_ENDING_SECONDS = 5.0
