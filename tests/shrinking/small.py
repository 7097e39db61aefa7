"""Networks of few steps, and short texts of what their analysis says."""

import torch
from torch import nn

from sparsefn.shrinking.analysis import analyse
from sparsefn.shrinking.groups import groups
from sparsefn.shrinking.rebuild import program
from sparsefn.shrinking.trace import traced


class Of(nn.Module):
    """Named layers, parameters and buffers, and a function of them."""

    def __init__(self, fn, **parts):
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.fn = fn

    def forward(self, *xs):
        return self.fn(self, *xs)


def analysed(net, *xs, masks=None, **options):
    return analyse(traced(net.eval(), xs), masks, **options)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def drawn(net):
    """Norms with statistics and weights of their own, as after training; in eval mode
    and float64.
    """
    for layer in net.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
        if "Norm" in type(layer).__name__:
            for parameter in layer.parameters():
                parameter.data.normal_()
    return net.double().eval()


def told(build, **options):
    """What goes together, and what stays by its reason, once units are seen to go with
    equal outputs.

    Left out is what stays since it is an output, or joined with inputs.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net, x = build()
        net = drawn(net)
    x = x.double() if x.is_floating_point() else x
    found = groups(net, x, **options)
    for last in (False, True):
        check_cut(
            net,
            found,
            {
                i: one_unit(group, last)
                for i, group in enumerate(found)
                if group.size > 1
            },
            x,
        )
    why = {}
    for (name, dim), reason in found.stays.items():
        if not reason.startswith(("it is an output", "joined with what stays")):
            why.setdefault(reason, []).append(f"{name}[{dim}]")
    members = [str(group).split(": ", 1)[1].split("; ")[0] for group in found]
    return members, {reason: ", ".join(names) for reason, names in why.items()}


def one_unit(group, last):
    return [group.size - 1] if last else list(range(group.size // 2))


def check_cut(net, found, gone, *xs):
    """The smaller program gives the outputs of the masked model."""
    masks, params = found.masks(gone), dict(net.named_parameters())
    with torch.no_grad():
        masked = {
            name: p * masks[name] if name in masks else p for name, p in params.items()
        }
        wanted = torch.func.functional_call(net, masked, xs)
        got = program(found.cut(gone))(*xs)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


VECTOR, MAP, TOKENS = (
    torch.linspace(-1, 1, 6).reshape(2, 3),
    torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4),
    torch.linspace(-1, 1, 30).reshape(2, 5, 3),
)


def lin(fn, mid=4, out=None, **parts):
    """Linear layers a and b around a function."""
    return Of(fn, a=nn.Linear(3, mid), b=nn.Linear(out or mid, 2), **parts), VECTOR


def conv(fn, mid=4, out=None, **parts):
    """Convolutions a and b around a function."""
    return Of(fn, a=nn.Conv2d(3, mid, 1), b=nn.Conv2d(out or mid, 2, 1), **parts), MAP
