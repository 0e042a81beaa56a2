"""Runs a server in a process of its own, which tests stop, continue and kill; says where it is on its first line."""

from __future__ import annotations

import resource
import sys

from hyper_ckpt.key_value import KeyValueServer


def main() -> None:
    if len(sys.argv) > 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
    server = KeyValueServer("127.0.0.1")
    print(server.address.encoded().decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
