"""A store whose publish is not exclusive. Imported by name, so that other processes find it."""

from __future__ import annotations

import time
from typing import Any

from hyper_ckpt.contracts.store import Expect
from hyper_ckpt.errors import CheckpointReplacedError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.testing.faults import WrapperStore


class CheckThenAct(WrapperStore):
    """Looks, waits a moment, and then writes whatever is there by now."""

    def publish(self, name: str, data: bytes, expect: Expect | str, *, sync: bool) -> str:
        info = self.inner.stat(name)
        if expect not in (Expect.ANY, Expect.ABSENT if info is None else info.etag):
            raise CheckpointReplacedError(name)
        if expect is not Expect.ANY:
            time.sleep(0.02)
        return self.inner.publish(name, data, Expect.ANY, sync=sync)

    def __reduce__(self) -> Any:
        return CheckThenAct.at, (self.url,)

    @classmethod
    def at(cls, path: str) -> CheckThenAct:
        return cls(LocalStore(path))
