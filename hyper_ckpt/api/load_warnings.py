"""What a load tells its user besides its report: what was left out, kept or taken from another rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from hyper_ckpt.api.common import few
from hyper_ckpt.api.matching import Match
from hyper_ckpt.contracts.platform import Ranks
from hyper_ckpt.manifest import Manifest
from hyper_ckpt.options import Strict
from hyper_ckpt.text import clean

logger = logging.getLogger("hyper_ckpt")


def tell(
    match: Match,
    kept: Sequence[str],
    of_ranks: Sequence[str],
    changed: Sequence[str],
    strict: Strict,
    ranks: Ranks,
    *,
    knows: bool,
) -> None:
    """Warns on this rank. Called right below the frame of the load's story.

    Args:
        kept: `PerRank` names that kept the target's value.
        of_ranks: `PerRank` names that got a value, where another number of ranks saved the checkpoint.
        changed: what objects made another dtype of.
        knows: this rank speaks for all of them: it has heard what they want.
    """
    rank, left_out = ranks.rank, match.left_out()
    if left_out and strict is True and knows:
        warnings.warn(
            f"{len(left_out)} saved values were not loaded, since the target has no place for them: "
            f"{few([*map(repr, left_out)])}. Create them first, put the object itself into the state (an optimizer "
            "takes its moments, but its state_dict() has none before its first step), or name them in "
            "LoadOptions(ignore=[...]) if this is meant",
            stacklevel=6,
        )
    if changed:
        warnings.warn(
            f"load_state_dict changed dtypes: {few(changed)}. Values may have lost bits: make the object hold what "
            "was saved, or let its load_state_dict keep dtypes",
            stacklevel=6,
        )
    absent = [*match.uncovered, *match.missing] if match.manifest and match.manifest.absent else []
    if absent:
        warnings.warn(
            f"{match.checkpoint} lacks the parts of {ranks_text(match.manifest)}: left as they were, in whole, are "
            f"{few([*map(repr, absent)])}",
            stacklevel=6,
        )
    if match.forgotten and knows:
        logger.warning("%s", forgotten_text(match.forgotten, match.checkpoint))
    if kept:
        warnings.warn(
            f"{few([*map(repr, kept)])} belong to ranks, and no rank {rank} saved any: the target's own values were "
            "kept",
            stacklevel=6,
        )
    if of_ranks and rank == 0 and match.manifest:
        warnings.warn(
            f"{match.manifest.world_size} ranks saved this checkpoint and {ranks.world_size} load it: of "
            f"{few([*map(repr, of_ranks)])}, which belong to ranks, each rank got what the rank of its number saved. "
            "For random states that will do; positions in data that is split over the ranks mean something else now: "
            "see docs/how-to/data-loaders.md",
            stacklevel=6,
        )
    if match.borrowed:
        warnings.warn(
            f"{few([*map(repr, match.borrowed)])} differed between ranks: rank {rank} got the lowest rank's",
            stacklevel=6,
        )


def ranks_text(manifest: Manifest | None) -> str:
    """The ranks whose parts are missing."""
    ranks = sorted(manifest.absent) if manifest else []
    return f"rank{'s' * (len(ranks) > 1)} {few([*map(str, ranks)])}"


def forgotten_text(keys: Sequence[str], where: str) -> str:
    """What is said of top-level keys that no target mentions."""
    names = few([*map(repr, keys)])
    return clean(
        f"{where} has {names}, which the target does not mention: not loaded. Give the target a place for "
        f"{'them' if len(keys) > 1 else 'it'}, or say LoadOptions(ignore=[...]) if this is meant"
    )
