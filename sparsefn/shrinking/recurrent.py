"""LSTM, GRU and RNN layers: the rows of all gates of a hidden unit go together."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsefn.shrinking.atoms import product
from sparsefn.shrinking.moves import divided
from sparsefn.shrinking.steps import Step
from sparsefn.shrinking.values import replaced, values_in

# how many, and which is the candidate
_GATES = {"lstm": (4, 2), "gru": (3, 2), "rnn_tanh": (1, 0), "rnn_relu": (1, 0)}


def recurrent(step: Step) -> Any:
    """A hidden unit is 0 at all times where its candidate gate, the cell's in an LSTM,
    and its first state are.
    """
    gates, candidate = _GATES[step.name]
    x = step.arguments["input"]
    params = step.arguments["params"]
    outs = values_in(step.outs)
    states = values_in(step.arguments["hx"])
    per = 4 if step.arguments["has_biases"] else 2
    sides = 2 if step.arguments["bidirectional"] else 1
    size = outs[1].shape[-1]
    # projections of the state
    if any(value.shape[0] != gates * size for value in params):
        step.mixes(x, *states, *params)
        return step.outs
    for label in (label for state in states for label in state.labels[:-1]):
        step.freeze(label, "has a state for each layer and sequence")
    hidden = step.join(*(state.labels[-1] for state in states))
    zero = np.all([state.zero(len(state.shape) - 1) for state in states], 0)
    below = x.labels[-1]
    below_zero = x.zero(len(x.shape) - 1)
    above = []
    for start in range(0, len(params), per):
        w_in, w_state, *biases = params[start : start + per]
        rows = step.join(*(value.labels[0] for value in (w_in, w_state, *biases)))
        gate, unit = divided(step, rows, gates, size) if gates > 1 else (None, rows)
        step.freeze(gate, "has a gate of each kind")
        hidden = step.join(hidden, unit, w_state.labels[1])
        silent = (
            np.all(
                [
                    v.zero(0).reshape(gates, size)[candidate]
                    for v in (w_in, w_state, *biases)
                ],
                0,
            )
            & zero
        )
        step.freeze(
            hidden,
            "keeps its state in it, and it is not 0 where it is masked",
            ~silent & ~w_state.zero(1),
        )
        if w_in.shape[1] > 1:
            step.sums(step.join(below, w_in.labels[1]), below_zero | w_in.zero(1))
        above.append(silent)
        if len(above) % sides == 0:
            below = product(None, sides, hidden, size)
            below_zero = np.concatenate(above[-sides:])
    made = []
    for out in outs:
        wide = out.shape[-1] == size * sides and out is outs[0]
        silent = below_zero if wide else np.all(above, 0)
        rest = [None] * (len(out.shape) - 1)
        gone = np.where(silent, 0.0, np.nan)
        made.append(
            out._replace(labels=(*rest, below if wide else hidden), gone=(*rest, gone))
        )
    return replaced(step.outs, made)
