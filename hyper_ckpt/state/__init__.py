"""Nested state <-> named leaves. Knows no ranks beyond their numbers, no tensors beyond their names, no files."""

from __future__ import annotations

from hyper_ckpt.state.adopt import Adopted, Place, adopt
from hyper_ckpt.state.ask import Substate
from hyper_ckpt.state.blobs import BLOB_LIMIT
from hyper_ckpt.state.build import MakeTensor, rebuild
from hyper_ckpt.state.check import check_tree, decode_tree
from hyper_ckpt.state.codecs import BUILTIN
from hyper_ckpt.state.compare import Difference, compare, leaves
from hyper_ckpt.state.digests import canonical, skeleton, values_digest
from hyper_ckpt.state.flat_state import FlatState, PartsOf, ToHost
from hyper_ckpt.state.flatten import flatten
from hyper_ckpt.state.groups import fit_groups, groups_advice
from hyper_ckpt.state.merge import Conflict, Selection, Whose, merge, select
from hyper_ckpt.state.names import escape_key, join, parse_key
from hyper_ckpt.state.restore import Loaded, Restore, prepare_restore
from hyper_ckpt.state.tree import MAX_DEPTH, BlobNode, Node, RawNode, encode_tree
from hyper_ckpt.state.variants import keep_variants, label_of, variants_of

__all__ = [
    "BLOB_LIMIT",
    "BUILTIN",
    "MAX_DEPTH",
    "Adopted",
    "BlobNode",
    "Conflict",
    "Difference",
    "FlatState",
    "Loaded",
    "MakeTensor",
    "Node",
    "PartsOf",
    "Place",
    "RawNode",
    "Restore",
    "Selection",
    "Substate",
    "ToHost",
    "Whose",
    "adopt",
    "canonical",
    "check_tree",
    "compare",
    "decode_tree",
    "encode_tree",
    "escape_key",
    "fit_groups",
    "flatten",
    "groups_advice",
    "join",
    "keep_variants",
    "label_of",
    "leaves",
    "merge",
    "parse_key",
    "prepare_restore",
    "rebuild",
    "select",
    "skeleton",
    "values_digest",
    "variants_of",
]
