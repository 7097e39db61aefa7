"""The smaller model: of the same class, with fitting sizes in its modules, or else the
traced program with fewer entries.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from sparsefn.shrinking.attributes import (
    Guess,
    Pairs,
    give_back,
    guesses,
    node_sizes,
    outputs_of,
    settle,
)
from sparsefn.shrinking.config_numbers import set_configs
from sparsefn.shrinking.plan import PruningPlan
from sparsefn.shrinking.rewrites import RULES, Rewrite, aten, refused, scale
from sparsefn.shrinking.small_layers import (
    COUNTED,
    averages,
    fold_norms,
    resize,
)
from sparsefn.shrinking.trace import tensor_at
from sparsefn.shrinking.values import (
    bind,
    module_of,
    named_module,
    node_arguments,
    opname,
    tensors_of,
    values_in,
)

Works = Callable[[nn.Module, Mapping[str, Tensor]], bool]


class SameClass(NamedTuple):
    """A smaller model of the same class, or why there is none."""

    model: nn.Module | None
    why: str = ""  # there is none
    # the parameters that are scaled, as norms of fewer entries need it
    scaled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the model's configs cannot say


def same_class(
    model: nn.Module,
    plan: PruningPlan,
    works: Works,
    tensors: Mapping[str, Tensor] | None = None,
) -> SameClass:
    """A copy of a model with smaller tensors, whose modules keep fitting sizes.

    `works(small, exact)` has to run a model, with the tensors `exact` in float64 in
    place of its own, which were rounded, and to say whether it gives the wanted
    outputs: on the same inputs each time, and False where the model fails. It may copy
    the model. Only a model that `works` accepted is returned.

    Tensors have their old names; entries of `tensors` take their place, rounded to the
    dtypes of the model. What torch's layers keep about sizes follows from their
    tensors. Other numbers that modules keep are guessed: numbers that equal a size that
    changes in the module's forward. Where a number may mean several sizes these are
    tried, at most `attributes.TRIES` in all: it is better if more modules in turn give
    the outputs that they have in the masked model. What need not change for the outputs
    stays as it was, unless a config says it. The reason, where there is no such model,
    names the first module that does not give those outputs.

    Norms of torch that lose entries become norms of `small_layers`. Of an RMS norm in a
    module's own code the weight and eps are scaled, which is the same: `scaled` names
    these parameters. Configs are set where a new model from them equals
    the smaller model; `notes` says where not.
    """
    given = tensors or {}
    exact = dict[str, Tensor]()

    def taken(name: str, x: Tensor) -> Tensor:
        made = plan.take(name, given.get(name, x))
        if made.dtype != x.dtype:
            exact[name] = made
        return made.to(x.dtype)

    answers: list[bool] = []

    def proven(some: nn.Module) -> bool:
        answers.append(works(some, exact))
        return answers[-1]

    small = _with(model, plan, taken)
    why = resize(small, plan)
    if why:
        return SameClass(None, why)
    scaled = fold_norms(small, plan)
    exact |= scaled
    ready = {name.rpartition(".")[0] for name in scaled}
    for average in averages(plan):
        path = module_of(average.node)
        counts = type(small.get_submodule(path)) in COUNTED.values()
        if not counts and path not in ready:
            what = opname(average.node)
            where = named_module(small, path)
            return SameClass(
                None, f"{where} takes a {what} of entries that go in code of its own"
            )
    nodes = node_sizes(plan)
    sizes = [pair for pairs in nodes.values() for pair in pairs]
    unknown = guesses(small, nodes)
    notes: tuple[str, ...] = ()
    if not unknown:  # one proof is enough, of the model with its configs
        notes = with_configs(small, model, sizes, unknown, proven)
    if not any(answers) and not proven(small):
        wanted = outputs_of(_masked(model, plan), lambda some: works(some, {}))
        why = settle(small, unknown, proven, wanted, plan)
        if why:
            return SameClass(None, why)
    if unknown:
        notes = with_configs(small, model, sizes, unknown, proven)
    return SameClass(small, "", tuple(scaled), notes)


def with_configs(
    small: nn.Module,
    model: nn.Module,
    sizes: Pairs,
    unknown: list[Guess],
    works: Callable[[nn.Module], bool],
) -> tuple[str, ...]:
    """Set the configs of a smaller model, and give back the numbers that neither these
    nor its outputs need; notes.

    >>> with_configs(nn.ReLU(), nn.ReLU(), [], [], lambda small: True)
    ()
    """
    configs = dict(set_configs(small, model, sizes, works))
    said = tuple(f"{path}." if path else "" for path, why in configs.items() if not why)

    def is_said(guess: Guess) -> bool:
        return all(path.startswith(said) for path in guess.owners)

    give_back(small, [guess for guess in unknown if not is_said(guess)], works)
    return tuple(why for why in configs.values() if why)


def _with(
    model: nn.Module, plan: PruningPlan, new: Callable[[str, Tensor], Tensor]
) -> nn.Module:
    # A copy with other tensors in place of the program's, shared ones shared.
    made: dict[int, Any] = {}
    for name in plan.analysis.leaves:
        x = tensor_at(model, name)  # none is a constant of the program
        if isinstance(x, nn.Parameter):
            made[id(x)] = type(x)(new(name, x), x.requires_grad)
        elif isinstance(x, Tensor):
            made[id(x)] = new(name, x)
    return copy.deepcopy(model, made)


def _masked(model: nn.Module, plan: PruningPlan) -> nn.Module:
    # The whole model, with 0 for what goes: to find where a smaller model differs.
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def masked(name: str, x: Tensor) -> Tensor:
        if name not in parameters:
            return x.detach().clone()
        masks = plan.analysis.log.masks
        mask = plan.mask(name) if masks is None else masks.get(name)
        return x.detach().clone() if mask is None else x.detach() * mask.to(x.device)

    return _with(model, plan, masked)


class Program(fx.GraphModule):
    """A traced module, with the code of the graph and the mode of the trace."""

    def __init__(
        self, root: nn.Module, graph: fx.Graph, class_name: str = "Program"
    ) -> None:
        super().__init__(nn.Module(), fx.Graph(), class_name)
        # GraphModule would make all buffers part of the state_dict
        vars(self).update(vars(root))
        self.graph = graph

    def _deepcopy_init(self) -> Any:
        return Program.__init__

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        with warnings.catch_warnings():
            # of torch, about its own signatures
            warnings.simplefilter("ignore", FutureWarning)
            made: fx.GraphModule = super().__deepcopy__(memo)
        return made

    def train(self, mode: bool = True) -> Program:
        """Set the flag alone: the operations are as in the mode in which the model
        was traced.
        """
        other_mode = mode != self.meta.get("train", False)
        if other_mode and any(map(_has_mode, self.graph.nodes)):
            made, other = ("eval", "True") if mode else ("train", "False")
            warnings.warn(
                f"this program was traced in {made} mode, and computes so whatever "
                f"train() and eval() say: take one with train={other}, and the "
                "parameters of this one by load_state_dict",
                stacklevel=2,
            )
        return super().train(mode)


def _has_mode(node: fx.Node) -> bool:
    # Whether an operation has an argument that says the mode.
    given = node_arguments(node)
    has_flag = "train" in given or "training" in given
    return has_flag and given.get("p") != 0


def program(plan: PruningPlan, tensors: Mapping[str, Tensor] | None = None) -> Program:
    """The traced program without the entries that go.

    Parameters and buffers are smaller copies under their old names; entries of
    `tensors` take their place. Arguments that say sizes or places are computed, so that
    inputs may have other sizes wherever the traced program allows that. Inputs other
    than tensors have to be as in the trace. Tensors that the program makes are on the
    device of its first input.

    Raises ValueError for an operation that cannot follow, with its name and module.
    """
    old = plan.analysis.graph
    graph = fx.Graph()
    nodes = dict[fx.Node, fx.Node]()
    leaves = tensors_of(old)
    root = _leaves(plan, leaves, tensors or {})
    for node in old.graph.nodes:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.set_codegen(old.graph._codegen)
    for before, node in nodes.items():
        if node.op == "call_function" and node.target is not operator.getitem:
            _follow(plan, root, before, node)
    _open(graph)
    read = {node.target for node in graph.find_nodes(op="get_attr")}
    with graph.inserting_before(nodes[old.graph.output_node()]):
        # a second name of a tensor
        for name in leaves:
            if name not in read:
                graph.get_attr(name)
    for node in nodes.values():  # of the old sizes
        for key in ("val", "tensor_meta", "from_node"):
            node.meta.pop(key, None)
    made = Program(root, graph)
    made.meta["train"] = old.meta.get("train", False)
    nn.Module.train(made, made.meta["train"])
    return made


def _leaves(
    plan: PruningPlan, leaves: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> nn.Module:
    # A module of modules with the smaller parameters, buffers and constants under their
    # names.
    old = plan.analysis.graph
    saved = set(plan.analysis.graph.state_dict())
    targets = [str(node.target) for node in old.graph.find_nodes(op="get_attr")]
    names = {id(leaves[name]): name for name in targets}
    made = dict[int, Tensor]()
    owners = {"": nn.Module()}
    for name, x in leaves.items():
        path, _, last = name.rpartition(".")
        owner = _owner(owners, path)
        if not isinstance(x, Tensor):
            setattr(owner, last, x)
            continue
        is_parameter = isinstance(x, nn.Parameter)
        if id(x) not in made:
            first_name = names.get(id(x), name)
            new = plan.take(first_name, tensors.get(name, x))
            if is_parameter:
                new = nn.Parameter(new, x.requires_grad)
            made[id(x)] = new
        if is_parameter:
            setattr(owner, last, made[id(x)])
        else:
            owner.register_buffer(last, made[id(x)], persistent=name in saved)
    for node in old.graph.find_nodes(op="call_module"):  # checks of the inputs
        name = str(node.target)
        owners[""].add_module(name, old.get_submodule(name))
    return owners[""]


def _owner(owners: dict[str, nn.Module], path: str) -> nn.Module:
    if path not in owners:
        outer, _, last = path.rpartition(".")
        owners[path] = nn.Module()
        _owner(owners, outer).add_module(last, owners[path])
    return owners[path]


def _follow(plan: PruningPlan, root: nn.Module, old: fx.Node, node: fx.Node) -> None:
    name = opname(old)
    known = plan.analysis.values
    tensors = values_in([known[one] for one in (old, *old.all_input_nodes)])
    if any(map(plan.loses, tensors)):
        if not hasattr(node.target, "_schema"):
            raise refused(old, "it is a program of its own")
        args, kwargs = fx.map_arg((old.args, old.kwargs), known.__getitem__)
        values = bind(node.target, args, kwargs)
        rewrite = Rewrite(plan, root, old, node, values, node_arguments(node))
        if name in RULES:
            RULES[name](rewrite)
            rewrite.write()
        elif name.startswith("sym_"):
            _unchanged(rewrite)
    # strides may differ
    if node.target in (aten.view.default, aten._unsafe_view.default):
        node.target = aten.reshape.default


def _unchanged(rewrite: Rewrite) -> None:
    # Numbers stay as in the whole program: a size that is read from a tensor is
    # scaled to what it was.
    if rewrite.name != "sym_size":
        rewrite.refuse("it counts them")
    node = rewrite.node
    value = rewrite.values["self"]
    dim = rewrite.values["dim"]
    if dim % value.ndim in rewrite.lost(value):
        new = rewrite.plan.size(value)[dim]
        factors = scale(rewrite.old.meta.get("val"), new, value.shape[dim])
        if factors is None:
            rewrite.refuse("it counts them, in a number that is no product")
        before, after = factors
        users = list(node.users)
        with node.graph.inserting_after(node):
            part = node.graph.call_function(operator.floordiv, (node, after))
        with node.graph.inserting_after(part):
            whole = node.graph.call_function(operator.mul, (part, before))
        for user in users:
            user.replace_input_with(node, whole)


def same_input(given: object, traced: object, name: str) -> None:
    """Raise ValueError for an argument that is not what it was when the model was
    traced.

    >>> same_input(None, None, "mask")
    >>> same_input(2, None, "mask")
    Traceback (most recent call last):
        ...
    ValueError: the program was traced with mask=None, got 2; ...
    """
    if given is not traced and (type(given) is not type(traced) or given != traced):
        raise ValueError(
            f"the program was traced with {name}={traced!r}, got {given!r}; trace the "
            "model with that"
        )


def _open(graph: fx.Graph) -> None:
    # Arguments that are no tensors have to be as in the trace; new tensors are on the
    # device of the first input.
    inputs = graph.find_nodes(op="placeholder")
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    if not inputs:
        return
    with graph.inserting_before(inputs[-1].next):
        for node in inputs:
            if node not in tensors:
                traced = node.meta.get("val")
                graph.call_function(same_input, (node, traced, node.target))
        if not tensors:
            return
        device = graph.call_function(getattr, (tensors[0], "device"))
    for node in graph.nodes:
        given = node_arguments(node)
        if given.get("device") == tensors[0].meta["val"].device:
            place = list(given).index("device")
            if place < len(node.args):
                node.update_arg(place, device)
            else:
                node.update_kwarg("device", device)
    if not device.users:
        graph.erase_node(device)
