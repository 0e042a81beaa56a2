"""The one place that knows where tensors' memory is, and how MindSpore moves it.

Code for Ascend stands in `Device` only, so that a stand-in can take its place where there is no device. It was
written from MindSpore's sources and has not been run on one.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore._c_expression import MSContext, ms_ctx_param
from mindspore.common import np_dtype
from mindspore.common.api import _pynative_executor

from hyper_ckpt.contracts.platform import ByteBuffer, Carrier
from hyper_ckpt.errors import TargetError

_BFLOAT16 = np.dtype(np_dtype.bfloat16)
# MindSpore has few operations for these: their bytes are copied instead.
_OPAQUE = ("Float8E4M3FN", "Float8E5M2", "Int4")


def tensor_over(array: Carrier) -> ms.Tensor:
    """A host tensor over the memory of a contiguous array, which it keeps alive.

    Never over read-only memory: MindSpore does not know of it, and a write ends the process.
    """
    return ms.Tensor.from_numpy(array)


def array_of(tensor: ms.Tensor) -> Carrier:
    """The tensor's elements in host memory: a copy, or where that is the host's its own memory. Waits for it."""
    array: Carrier = tensor.asnumpy()
    return array


def finish() -> None:
    """Waits until all that this process has asked of MindSpore is done. Raises what went wrong in it."""
    _pynative_executor.sync()
    # Asked of every tensor: get_context() takes thirty times as long.
    if MSContext.get_instance().get_param(ms_ctx_param.device_target) != "CPU":
        ms.runtime.synchronize()


def run_of(tensor: ms.Tensor) -> ms.Tensor:
    """The tensor, or a copy of it in one run; as bytes where MindSpore knows little more of its dtype."""
    plain = tensor.view(ms.uint8) if str(tensor.dtype) in _OPAQUE else tensor
    return plain if plain.is_contiguous() else plain.contiguous()


class Device:
    """Where tensors are, and copies between device and host memory. All of it in the caller's thread."""

    def on_host(self, tensor: ms.Tensor) -> bool:
        """Whether the tensor's memory is the host's."""
        return str(tensor.device).startswith("CPU")

    def copy_out(self, tensor: ms.Tensor, buffer: ByteBuffer) -> None:
        """Copies the tensor's bytes, row-major, into `buffer` of just that size; complete on return."""
        np.copyto(buffer, array_of(run_of(tensor)).reshape(-1).view(np.uint8))

    def copy_in(self, buffer: ByteBuffer, tensor: ms.Tensor) -> None:
        """Copies row-major bytes into a contiguous tensor; complete on return.

        One copy of the whole tensor: MindSpore loses writes through views of a part.

        Raises:
            TargetError: MindSpore cannot copy tensors of this dtype.
        """
        name, shape = str(tensor.dtype), tuple(tensor.shape)
        if name == "Int4":  # a view of it as bytes is a copy
            raise TargetError("an Int4 tensor on a device cannot be loaded into: load it as int8 on the host")
        if name in _OPAQUE:
            tensor.view(ms.uint8).copy_(tensor_over(buffer.reshape(shape)))
        else:
            plain = _BFLOAT16 if name == "BFloat16" else np.dtype(ms.dtype_to_nptype(tensor.dtype))
            tensor.copy_(tensor_over(buffer.view(plain).reshape(shape)))
        finish()
