"""An algorithm at work in a module: gradients out, effective weights in, around the optimizer's own step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsefn.algorithms.frame import unchecked
from sparsefn.attached import files
from sparsefn.attached.slots import Slot, address, clear_moments, differ, enter, gradient, leave, slots_of, zeros_stay
from sparsefn.compose.moments import live_entries
from sparsefn.engine.checks import is_int
from sparsefn.engine.leafwise import is_sparse, sparse_among
from sparsefn.state import Algorithm, State, effective, has_own_support, inside
from sparsefn.tree import Tree, all_finite, flatten, identical, leaves_of, opened, zipped

_CALL_AFTER = "call after_step after every before_step, also where the optimizer skipped its step"


class Attached:
    """What `attach` returns: call `before_step` and `after_step` around the optimizer's step.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    >>> sparse = sf.attach(sf.static(0.5, where="weight"), layer, optimizer)
    >>> layer(torch.ones(2)).sum().backward()
    >>> sparse.before_step()
    >>> optimizer.step()
    >>> sparse.after_step(0)
    >>> int(layer.weight.count_nonzero())
    1

    The module holds the effective weights, and where those say all that the state's params do, the state has no copy
    of them. Until the first step the weights that `attach` masked are kept as they were, for `load_state_dict`. Only
    parameters that require a gradient are read or written.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        weights: dict[str, Slot],
        optimizers: Sequence[Optimizer],
        options: Mapping[str, object] | None,
    ) -> None:
        state = algorithm.init({name: slot.parameter.detach() for name, slot in weights.items()})
        if state.opt != ():
            raise ValueError(
                "attach: expected an algorithm without with_optimizer, as the torch optimizer takes its place"
            )
        trained = algorithm.view.get(state)
        self._algorithm, self._weights, self._state = algorithm, weights, state
        self._slots, beside = slots_of(trained, flatten(state.params)[0], weights)
        own = {id(slot.parameter) for slot in weights.values()}
        self._extra = [slot for slot in self._slots if id(slot.parameter) not in own]
        self._moving = {id(slot.parameter) for slot in self._slots}
        self._beside = self._moving - own  # the parameters of `_extra`
        self._trains_params = trained is state.params
        self._zeros_stay = zeros_stay(optimizers)
        self._hidden: set[str] = set()  # weights whose params are not what the module shows
        self._dense: Tree | None = None  # gradients between before_step and after_step
        self._masked: list[tuple[Tensor, int]] = []  # gradients given to the optimizer, and their versions
        self._last, self._hooks = -1, []  # type: ignore[var-annotated]
        # Weights that `_show` is about to change, until the first step: `load_state_dict` may put other masks on them.
        shown = effective(state)
        hidden = differ([(shown[name], slot.parameter.detach()) for name, slot in weights.items()])
        self._found: dict[str, Tensor] | None = {
            name: slot.parameter.detach().clone() for name, slot in itertools.compress(weights.items(), hidden)
        }
        enter(self._extra, beside, options)
        self._show(state, None)

    # ---- in the loop ------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, step: int | None = None) -> None:
        """Make each `p.grad` what the optimizer is to see; call after backward, before gradients are clipped.

        The dense gradients are kept for `after_step`. A parameter without a gradient stays without one; the algorithm
        sees zeros. `step` is the one that `after_step` will get, if it is not the next; only terms that change with
        the step read it. In a closure, call it after backward.
        """
        self._check_attached()
        self._check_fresh()
        now = self._last + 1 if step is None else step
        self._state = self._held()
        if self._found is not None:
            self._clear(self._state, self._state)
            self._found = None
        leaves, rebuild = flatten(self._state.params)
        dense = rebuild([gradient(self._weights[name].parameter) for name in leaves])
        grads = leaves_of(self._algorithm.view.grads(self._state, dense, now))
        for name, slot in self._weights.items():
            if id(slot.parameter) not in self._moving:
                slot.parameter.grad = None
            elif name in self._hidden:
                slot.parameter.copy_(leaves[name])
        given = {id(grad) for grad in leaves_of(dense)}
        self._masked = []
        for (parameter, _), grad in zip(self._slots, grads, strict=True):
            if id(grad) not in given and (parameter.grad is not None or id(parameter) in self._beside):
                parameter.grad = grad
                self._masked.append((grad, grad._version))
        self._dense = dense

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the masks, and put the effective weights into the module; call after the optimizer's step.

        Steps only rise. Weights and moments are written where masks changed. A step whose gradients are not finite,
        such as one that a GradScaler skips, changes no mask.
        """
        self._check_attached()
        if self._dense is None:
            raise RuntimeError("after_step: call before_step first, between backward and the optimizer's step")
        if not is_int(step):
            raise TypeError(f"after_step: expected step to be an int, got {step!r}")
        if step <= self._last:
            raise ValueError(f"after_step: expected a step after {self._last}, got {step}")
        dense, self._dense, self._masked, self._last = self._dense, None, [], step
        old, stepped = self._state, self._stepped()
        shows_all = self._trains_params and self._zeros_stay and not self._hidden
        try:
            new = unchecked(self._algorithm)(stepped, dense, step)
            if new is not stepped and not (identical(new, stepped) or bool(all_finite(dense))):
                new = stepped
        except BaseException:
            self._show(stepped, old)
            raise
        if new is stepped and shows_all:
            self._state = new
        else:
            self._clear(new, stepped)
            self._show(new, old)

    def _held(self) -> State:
        # The state with the module's own weights, wherever their memory is by now.
        if not self.is_attached:
            return self._state
        leaves, rebuild = flatten(self._state.params)
        own = {name: self._weights[name].parameter.detach() for name in leaves if name not in self._hidden}
        return self._state._replace(params=rebuild([own.get(name, leaf) for name, leaf in leaves.items()]))

    def _stepped(self) -> State:
        # The state with what the optimizer has made of the trained leaves.
        state, view = self._held(), self._algorithm.view
        if self._hidden or not self._trains_params:
            values = [slot.parameter.detach() for slot in self._slots]
            return view.put(state, opened(view.get(state))[1](values))
        return state if self._zeros_stay else state._replace(params=inside(state.masks, state.params))

    def _clear(self, new: State, old: State) -> None:
        # Moments end where weights are pruned, and begin anew where they grow.
        view = self._algorithm.view
        rows, _ = zipped(view.support(new), view.support(old), view.get(new), view.get(old))
        sparse = sparse_among([row[0] for row in rows], [row[2] for row in rows])
        for slot, row, is_masked in zip(self._slots, rows, sparse, strict=True):
            live = live_entries(*row) if is_masked else None
            if live is not None:
                clear_moments(slot, live)

    def _show(self, new: State, old: State | None) -> None:
        # The module gets the effective weights; the state keeps the params that those do not show.
        masks, before = flatten(new.masks)[0], {} if old is None else flatten(old.masks)[0]
        params, rebuild = flatten(new.params)
        shows = dict(zip(params, leaves_of(effective(new)), strict=True))
        changed = {name: mask for name, mask in masks.items() if mask is not before.get(name)}
        self._hidden = self._hidden.difference(changed) | _hiding(new, changed, params, shows)
        for name, shown in shows.items():
            parameter, leaf = self._weights[name].parameter, params[name]
            held = address(leaf) == address(parameter)
            if name not in changed and held and name not in self._hidden:
                continue
            if name in self._hidden:
                params[name] = leaf.clone() if held else leaf
            parameter.copy_(shown)
            if name not in self._hidden:
                params[name] = parameter.detach()
        for slot, leaf in zip(self._slots, leaves_of(self._algorithm.view.get(new)), strict=True):
            if id(slot.parameter) in self._beside and address(leaf) != address(slot.parameter):
                slot.parameter.copy_(leaf)
        self._state = new._replace(params=rebuild(list(params.values())))

    @property
    def is_attached(self) -> bool:
        """Whether `detach` has not been called."""
        return bool(self._weights)

    def _check_attached(self) -> None:
        if not self.is_attached:
            raise RuntimeError("this algorithm was detached: attach it again")

    def _check_fresh(self) -> None:
        if self._dense is None:
            return
        if self._hidden:
            raise RuntimeError(f"before_step: called twice, without after_step between: {_CALL_AFTER}")
        given = {id(grad): version for grad, version in self._masked}
        if any(given.get(id(slot.parameter.grad)) == _version(slot.parameter.grad) for slot in self._slots):
            raise RuntimeError(f"before_step: called twice after one backward: {_CALL_AFTER}")

    # ---- the state --------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """The algorithm's pure state: a snapshot, which later steps leave as it is.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(sf.static(0.5, where="weight"), layer, torch.optim.Adam(layer.parameters()))
        >>> sf.masks.sparsity(sparse.state.masks)
        0.5

        `opt` is (): moments are the optimizer's. Read it after `after_step`, when weights and masks belong together.
        """
        leaves, rebuild = opened(self._held())
        return rebuild(self._own(leaves))  # type: ignore[no-any-return]

    def _own(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        # Copies of the tensors that later steps write into.
        held = {address(slot.parameter) for slot in (*self._weights.values(), *self._extra)}
        return [leaf.clone() if address(leaf) in held else leaf for leaf in leaves]

    def state_dict(self) -> dict[str, object]:
        """What `load_state_dict` needs: tensors by path, the last step, and the algorithm's name.

        Weights that the module has are left out: save the state dicts of the module and of the optimizer beside it.
        """
        shown = [name for name in self._weights if name not in self._hidden]
        return files.saved(self._algorithm, self._state, self._last, shown, self._own)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`: masks, scores and step, and effective weights into the module.

        Load the module and the optimizer as torch has it, before or after `attach` and this; but an optimizer that got
        new parameters from `attach`, as for `supermask`, after it. Raises ValueError for the state of another
        algorithm, naming both, and for tensors that do not fit, naming the path; then nothing is changed.
        """
        self._check_attached()
        state, self._last = files.loaded(self._algorithm, state_dict, self._state, self._loaded())
        self._dense = None
        self._clear(state, state)
        self._show(state, None)

    def _loaded(self) -> dict[str, Tensor]:
        # The weights for the masks of a file: the module's, or, where it has what `attach` made of them, those before.
        own = {name: slot.parameter.detach() for name, slot in self._weights.items()}
        found = own | (self._found or {})
        shown = effective(self._algorithm.init(found)) if self._found else own
        others = differ([(leaf, shown[name]) for name, leaf in own.items()])
        return {name: leaf if other else found[name] for (name, leaf), other in zip(own.items(), others, strict=True)}

    def detach(self) -> None:
        """Leave an ordinary module with its effective weights, and the optimizer as it was; `state` stays.

        >>> layer = torch.nn.Linear(2, 1)
        >>> sparse = sf.attach(sf.static(0.5, where="weight"), layer, torch.optim.Adam(layer.parameters()))
        >>> sparse.detach()
        >>> sparse.before_step()
        Traceback (most recent call last):
            ...
        RuntimeError: this algorithm was detached: attach it again
        """
        self._check_attached()
        if self._dense is not None and self._hidden:
            raise RuntimeError(f"detach: called between before_step and after_step: {_CALL_AFTER}")
        for hook in self._hooks:
            hook.remove()
        leave(self._extra)
        self._state = self.state
        self._weights, self._hooks, self._dense, self._found = {}, [], None, None


def _hiding(state: State, masks: Mapping[str, Tensor], params: Mapping[str, Tensor], shown: Tree) -> set[str]:
    # The leaves that have, or may come to have, values under these masks that the effective weights do not show.
    names = [name for name, mask in masks.items() if is_sparse(mask, params[name])]
    if has_own_support(state):
        return set(names)
    return set(itertools.compress(names, differ([(shown[name], params[name]) for name in names])))


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version
