"""What all ranks agree on: that they are all here, what they described, and whose error stops everybody.

Run on every rank. A step ends with one value everywhere, or with the same error everywhere.
"""

from __future__ import annotations

from hyper_ckpt.agreement.exchange import broadcast_bytes, broadcast_sized
from hyper_ckpt.agreement.operation import Operation, StoppedError, in_step
from hyper_ckpt.agreement.verdict import names

__all__ = ["Operation", "StoppedError", "broadcast_bytes", "broadcast_sized", "in_step", "names"]
