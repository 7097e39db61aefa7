"""Checkpoints of release 0.2, whose states had their parts among their scores and keys.
To be deleted in 2027-12.
"""

from __future__ import annotations

from collections.abc import Mapping

import optree
from torch import Tensor

from sparsefn.core.state import State
from sparsefn.core.tree import Tree, flatten

_FIELDS = ("masks", "scores", "key", "opt", "support")


def with_parts(template: Tree, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint under the paths of today; newer ones stay as they
    are.

    >>> state = sf.chain(sf.static(0.5), sf.static(0.5)).init({"w": torch.ones(1, 2)})
    >>> old = {
    ...     "params.w": 0,
    ...     "scores.0.masks.w": 1,
    ...     "scores.1.masks.w": 2,
    ...     "key.0": 3,
    ...     "key.1": 4,
    ...     "masks.w": 5,
    ... }
    >>> sorted(with_parts(state, old))
    ['masks.w', 'params.w', 'parts.0.key', 'parts.0.masks.w', 'parts.1.key',
    'parts.1.masks.w']
    """
    today: dict[str, str] = {}
    for prefix, state in _states(template).items():
        fields = {field: f"{prefix}{field}" for field in _FIELDS}
        today |= {
            path: old
            for path, old in _old_paths(state, prefix, fields).items()
            if path != old
        }
    if not today or any(path in found for path in today):
        return found
    moved = {old: path for path, old in today.items() if old in found}
    return {moved.get(path, path): x for path, x in found.items()}


def _states(template: Tree) -> dict[str, State]:
    # The states in a tree, each with the beginning of its paths.
    def is_state(node: object) -> bool:
        return isinstance(node, State)

    paths, nodes, _ = optree.tree_flatten_with_path(
        template, is_leaf=is_state, none_is_leaf=False
    )
    states: dict[str, State] = {}
    for path, node in zip(paths, nodes, strict=True):
        if is_state(node):
            beginning = "".join(f"{part}." for part in path)
            states[beginning] = node
    return states


def _old_paths(state: State, now: str, fields: Mapping[str, str]) -> dict[str, str]:
    """The path of each leaf of a state, and its old path; `fields` are the old paths of
    the state's fields.
    """
    found = {}
    for field, old in fields.items():
        for path in flatten(getattr(state, field))[0]:
            end = f".{path}" if path else ""
            found[f"{now}{field}{end}"] = f"{old}{end}"
    scores = fields["scores"]
    for i, part in enumerate(state.parts):
        if "rewind" in state.scores:
            olds = {**fields, "scores": f"{scores}.inner"}
        else:
            is_inner = "latent" in state.scores
            name = "inner" if is_inner else str(i)
            olds = {field: f"{scores}.{name}.{field}" for field in _FIELDS}
            for field in ("key", "opt"):
                olds[field] = fields[field] if is_inner else f"{fields[field]}.{i}"
        found |= _old_paths(part, f"{now}parts.{i}.", olds)
    return found
