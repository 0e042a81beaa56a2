"""Reads parts of what was saved beside a load, before it fills anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hyper_ckpt.columns import TensorTable
from hyper_ckpt.contracts.platform import Carrier, Ranks
from hyper_ckpt.dtypes import dtype_of
from hyper_ckpt.engine.load import Loader, LoadJob
from hyper_ckpt.engine.stored import Stored
from hyper_ckpt.engine.targets import Target
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.options import DEFAULT_MAX_HOST_BYTES
from hyper_ckpt.planning.load import plan_alone

if TYPE_CHECKING:
    from hyper_ckpt.api.loading import LoadCall

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class SavedBoxes:
    """What was saved, as a load on this rank would read it."""

    call: LoadCall
    ranks: Ranks
    manifest: Manifest
    stored: Stored

    def read(self, target: Target, boxes: Sequence[Box]) -> list[Carrier]:
        """Reads boxes (offsets in the whole tensor, sizes) of the tensor of a target, verified as the load asks.

        Returns:
            New arrays of carriers.
        """
        (row,) = self.manifest.rows([target.name])
        table = TensorTable.of([(target.name, row.dtype, row.shape)])
        columns = plan_alone(table, self.ranks.rank, [(target.name, *box) for box in boxes])
        located = self.call.reader.locate(self.manifest, columns, self.ranks.rank)
        self.stored.check_files(np.unique(located.file).tolist())
        arrays: list[Carrier] = [np.empty(sizes, dtype_of(target.dtype).carrier) for _, sizes in boxes]
        filled = [
            Target(target.name, offsets, sizes, target.dtype, array.nbytes, array)
            for (offsets, sizes), array in zip(boxes, arrays, strict=True)
        ]
        job = LoadJob(
            ranks=self.ranks,
            stager=self.call.platform.stager,
            stored=self.stored,
            store=self.call.store,
            columns=columns,
            located=located,
            targets={target.name: filled},
            batch_ready=lambda batch, ranks: None,
            batch_bytes=1,
            threads=self.call.threads,
            max_host_bytes=self.call.max_host_bytes,
            progress=lambda nbytes: None,
            shares=False,
            fills=False,
        )
        Loader(job, DEFAULT_MAX_HOST_BYTES).run()
        return arrays
