"""A failure as a test that can be pasted: its smallest example in plain torch and this library."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any

import torch

from sparsefn.checkpoint import tree_equal
from sparsefn.testing.laws_masks import expected_counts
from sparsefn.testing.meta import Row, given_function
from sparsefn.testing.strategies import large
from sparsefn.testing.values import Case
from sparsefn.testing.written import code_of, meta_code

if TYPE_CHECKING:
    from sparsefn.testing.laws import Check

_RUN = """def run(algorithm, params, grads):
    state = algorithm.init(params)
    for step, tree in enumerate(grads):
        state = algorithm.update(state, tree, step)
    return state"""
_STATES = """algorithm = {made}
states = [algorithm.init(params)]
for step, tree in enumerate(grads):
    states.append(algorithm.update(states[-1], tree, step))"""
# What a check says, for most of the ways to break it; where none of these fails, the check itself is called.
_TEXTS = """
counts_are_exact:
    {states}
    assert [sf.masks.n_kept(state.masks) for state in states] == {counts}
the_best_are_kept:
    {states}
    for step in {fires}:
        scores = sf.tree.flatten({choose}(states[step], grads[step], step))[0]
        for path, mask in sf.tree.flatten(states[step + 1].masks)[0].items():
            if mask.ndim:
                among = {among}
                best = sf.topk_mask(scores[path][among], int(mask.sum()))
                assert torch.equal(mask[among], best), path
masks_only_shrink:
    {states}
    for old, new in zip(states, states[1:]):
        assert sf.masks.n_kept(sf.masks.difference(new.masks, old.masks, params)) == 0
functions_are_pure:
    given, generator = copy.deepcopy((params, grads)), torch.get_rng_state()
    {states}
    assert torch.equal(torch.get_rng_state(), generator), "a global generator is used"
    assert sf.checkpoint.tree_equal((params, grads), given), "an input is changed"
inputs_may_change_later:
    state = {made}.init(params)
    before = copy.deepcopy(state)
    for leaf in sf.tree.flatten(params)[0].values():
        leaf.add_(1)
    assert sf.checkpoint.tree_equal(state, before), "the state shares memory with params"
runs_repeat:
    {run}
    torch.manual_seed(0)
    first = run({made}, params, grads)
    torch.manual_seed(1)
    assert sf.checkpoint.tree_equal(run({made}, params, grads), first)
nothing_happens_between_triggers:
    {states}
    for step in {quiet}:
        assert sf.checkpoint.tree_equal(states[step].masks, states[step + 1].masks), "masks change between triggers"
steps_may_be_tensors:
    algorithm = {made}
    numbers = tensors = algorithm.init(params)
    for step, tree in enumerate(grads):
        numbers, tensors = algorithm.update(numbers, tree, step), algorithm.update(tensors, tree, torch.tensor(step))
    assert sf.checkpoint.tree_equal(numbers, tensors)
vmap_is_a_loop:
    {run}
    stacked = sf.ensemble.stack([(params, grads), (grads[0], grads)])
    members = sf.ensemble.unstack(torch.vmap(lambda pair: run({made}, *pair))(stacked))
    assert sf.checkpoint.tree_equal(members[0], run({made}, params, grads))
compiling_changes_nothing:
    algorithm = {made}
    update = torch.compile(algorithm.update, backend="eager", fullgraph=True)
    state = algorithm.init(params)
    assert sf.checkpoint.tree_equal(update(state, grads[0], torch.tensor(0)), algorithm.update(state, grads[0], 0))
gradients_matter_where_declared:
    {run}
    other = [optree.tree_map(lambda g: g.flip(0) if g.ndim else -g, tree) for tree in grads[::-1]]
    masks = [run({made}, params, given).masks for given in (grads, other)]
    assert sf.checkpoint.tree_equal(*masks), "masks depend on gradients"
pruned_weights_are_zero:
    {states}
    for state in states:
        assert sf.checkpoint.tree_equal(state.params, sf.effective(state)), "a pruned weight is not zero"
sparsity_one_is_empty:
    {run}
    assert sf.masks.n_kept(run({made}, params, grads).masks) == 0
runs_resume:
    {states}
    algorithm = {made}
    state = sf.checkpoint.load_state_dict(algorithm.init(params), sf.checkpoint.state_dict(states[{cut}]))
    for step in range({cut}, len(grads)):
        state = algorithm.update(state, grads[step], step)
    assert sf.checkpoint.tree_equal(state, states[-1])
"""
_PLAIN = {name: dedent(body).strip() for name, body in re.findall(r"^(\w+):\n((?:    .*\n)+)", _TEXTS, re.M)}


def pasted(row: Row, check: Check, case: Case, error: Exception, own: bool) -> str:
    """A test of a case that a check fails on, run to see that it does; of the plain run where the error is its `own`.

    >>> from sparsefn.testing.laws import EXACT_COUNT
    >>> row = sf.testing.Row("none", lambda s, key, params: sf.static(1.0), sf.testing.Meta())
    >>> case = sf.testing.Case({"w": torch.ones(1, 2)}, (), 0.5, 0)
    >>> print(pasted(row, EXACT_COUNT.checks[0], case, AssertionError("after init: [0] kept, expected [1]"), False))
    import torch
    import sparsefn as sf
    <BLANKLINE>
    # none: what you gave
    <BLANKLINE>
    <BLANKLINE>
    def test_none_counts_are_exact():
        # after init: [0] kept, expected [1]
        params = {"w": torch.ones(1, 2)}
        grads = []
        algorithm = none(0.5, sf.random.key(0), params)
        states = [algorithm.init(params)]
        for step, tree in enumerate(grads):
            states.append(algorithm.update(states[-1], tree, step))
        assert [sf.masks.n_kept(state.masks) for state in states] == [1]

    Empty where the example is too large to be written down.
    """
    module, _, callee = (row.reference or "").partition(":")
    name = re.sub(r"\W+", "_", row.name).strip("_")
    callee = callee or ("made" if keyword.iskeyword(name) or not name.isidentifier() else name)
    data = _data(row, case)
    for body in _bodies(row, check, case, callee, own) if len(data) < 4000 else ():
        lines = data + body.strip()
        heads = [
            f"import {used}"
            for used in ("collections", "copy", "optree", "torch", check.run.__module__)
            if f"{used}." in lines
        ]
        heads += ["import sparsefn as sf"]
        if row.reference is not None:
            heads += [f"from {module} import {callee.split('.')[0]}"]
        given = [] if row.reference else [callee]
        given += ["meta"] if re.search(r"\bmeta\b", body) else []
        heads += ["", f"# {' and '.join(given)}: what you gave"] if given else []
        reason = f"    # {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        head = f"def test_{callee.replace('.', '_')}_{check.name}():"
        text = "\n".join([*heads, "", "", head, reason, indent(lines, "    ")])
        space = {"meta": row.meta, **({} if row.reference else {callee: given_function(row)[0]})}
        if _fails(text, space, type(error)):
            return text
    return ""


def _bodies(row: Row, check: Check, case: Case, name: str, own: bool) -> Iterator[str]:
    """Ways to say it, the plainest first."""
    body = "{states}" if own else _PLAIN.get(check.name, "")
    case = case._replace(sparsity=1.0) if check.name == "sparsity_one_is_empty" else case
    facts = _facts(row, case, name, "{counts}" in body)
    if body and all(f"{{{fact}}}" not in body or facts[fact] for fact in facts):
        yield body.format(**facts)
    if own:
        return
    call = f"lambda sparsity, key, params: {name}(sparsity, key{facts['third']})"
    yield f"""
row = sf.testing.Row("{row.name}", {call}, {meta_code(row.meta)})
{check.run.__module__}.{check.name}(row, sf.testing.Case(params, grads, {case.sparsity}, {case.seed}))
"""


def _facts(row: Row, case: Case, name: str, counts: bool) -> dict[str, str]:
    """What the texts need to know of an algorithm and a run; empty where it cannot be said so."""
    meta, steps = row.meta, range(len(case.grads))
    third = ", params" if given_function(row)[1] else ""
    entries = meta.layout.reduce is None and meta.layout.allowed is None
    alone = entries and meta.layout.fixed is None and meta.layout.ungrouped and not meta.joint
    made = f"{name}({case.sparsity}, sf.random.key({case.seed}){third})"
    return {
        "third": third,
        "made": made,
        "run": _RUN,
        "states": _STATES.format(made=made),
        "fires": str([step for step in steps if meta.when(step)]),
        "quiet": str([step for step in steps if not meta.when(step)]),
        "choose": (code_of(meta.score) or "") if alone and meta.score is not None else "",
        "among": "sf.tree.flatten(states[step].masks)[0][path]" if meta.monotone else "torch.ones_like(mask)",
        "counts": str([sum(expected) for *_, expected in expected_counts(row, case)]) if counts and entries else "",
        "cut": str(1 + case.seed % max(len(case.grads) - 1, 1)),
    }


def _data(row: Row, case: Case) -> str:
    """The params and gradients of a run, as code."""
    for elements in (150, 300, 40_000):
        if tree_equal((one := large(row.meta.layout.form, elements)).params, case.params):
            form = code_of(one)
            return f"params, grads, *_ = sf.testing.strategies.large({form}, {elements})\n"
    params, *grads = (code_of(tree) for tree in (case.params, *case.grads))
    parts = ["params" if text == params else str(text) for text in grads]
    listed = f"{len(parts)} * [{parts[0]}]" if len(set(parts)) == 1 and parts != parts[:1] else f"[{', '.join(parts)}]"
    return f"params = {params}\ngrads = {listed}\n"


def _fails(text: str, given: dict[str, Any], kind: type[Exception]) -> bool:
    space = {"__name__": "pasted", **given}
    with torch.random.fork_rng():
        try:
            exec(text, space)
            next(value for name, value in space.items() if name.startswith("test_"))()
        except Exception as error:
            return isinstance(error, kind)
    return False
