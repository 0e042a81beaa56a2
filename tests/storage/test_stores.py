"""The built-in stores against the suite that every store must pass, and with every wrapper around them."""

from pathlib import Path

import pytest

from hyper_ckpt.contracts.store import ByteStore
from hyper_ckpt.errors import StoreError
from hyper_ckpt.storage.local_store import LocalStore
from hyper_ckpt.storage.memory_store import MemoryStore
from hyper_ckpt.testing.conformance import StoreSuite
from hyper_ckpt.testing.conformance.store import put
from hyper_ckpt.testing.faults import CountingStore, FaultyStore, KillAt


class TestLocalStore(StoreSuite):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return LocalStore(tmp_path / "new" / "root")


class TestMemoryStore(StoreSuite):
    without = {"processes": "its objects live in one process"}  # noqa: RUF012

    def make_store(self, tmp_path: Path) -> ByteStore:
        return MemoryStore(f"memory://bucket{tmp_path}")

    def test_an_object_appears_when_it_is_complete(self, store: ByteStore) -> None:
        sink = store.create("a", 1)
        assert store.list() == []
        put(store, "a", b"1")
        with pytest.raises(StoreError, match="exists"):
            sink.close(sync=False)
        sink.abort()
        assert store.read("a") == b"1"

    def test_buckets_and_paths(self) -> None:
        try:
            whole, part = MemoryStore("memory://paths"), MemoryStore("memory://paths/run/1/")
            assert part.url == "memory://paths/run/1"
            put(part, "a", b"1")
            assert whole.list() == ["run/1/a"]
            assert MemoryStore("memory://other").list() == MemoryStore("memory://paths/run/10").list() == []
        finally:
            MemoryStore.drop_bucket("paths")
        assert MemoryStore("memory://paths").list() == []

    @pytest.mark.parametrize("url", ["", "bucket/path", "memory://", "memory:///", "s3://bucket"])
    def test_urls_of_another_form(self, url: str) -> None:
        with pytest.raises(StoreError, match="memory://bucket/path"):
            MemoryStore(url)


class _WrapperSuite(StoreSuite):
    without = {  # noqa: RUF012
        "it_can_be_pickled": "a wrapper belongs to one process: what is rebuilt from its URL is the store without it",
        "processes": "a wrapper belongs to one process",
    }


class TestCountingStore(_WrapperSuite):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return CountingStore(LocalStore(tmp_path / "root"))


class TestFaultyStore(_WrapperSuite):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return FaultyStore(MemoryStore(f"memory://bucket{tmp_path}"), lambda operation: None)


class TestKillAt(_WrapperSuite):
    def make_store(self, tmp_path: Path) -> ByteStore:
        return KillAt(LocalStore(tmp_path / "root"), 1 << 60)
