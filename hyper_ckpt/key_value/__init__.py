"""The key-value store through which ranks meet: served by rank 0's process, for all platforms.

`KeyValueServer` in the process of rank 0, `KeyValueClient` in the others; what both need travels as an `Address` over
whatever the job's ranks share already.
"""

from hyper_ckpt.key_value.addresses import Address, own_address
from hyper_ckpt.key_value.in_process import InProcessKeyValueStore
from hyper_ckpt.key_value.key_value_client import KeyValueClient
from hyper_ckpt.key_value.key_value_server import KeyValueServer

__all__ = ["Address", "InProcessKeyValueStore", "KeyValueClient", "KeyValueServer", "own_address"]
