"""Products of features that are not 0 where units go."""

from torch import nn

from tests.shrinking.small import Of
from tests.shrinking.zoo import image, in_the_zoo


@in_the_zoo
def likeness_of_features_after_a_sigmoid():
    def run(net, x):
        y = net.first(x).sigmoid().mean((2, 3))
        return y @ net.other(x).sigmoid().mean((2, 3)).T + net.head(y).sum(1)

    layers = {
        "first": nn.Conv2d(3, 6, 3),
        "other": nn.Conv2d(3, 6, 3),
        "head": nn.Linear(6, 4),
    }
    return Of(run, **layers), (image(),)


@in_the_zoo
def weights_that_read_a_sigmoid_twice():
    def run(net, x):
        y = net.first(x).relu().flatten(1)
        return net.head(
            y.sigmoid() @ net.first.weight.flatten(1) + y @ net.first.weight.flatten(1)
        )

    return Of(run, first=nn.Conv2d(3, 6, 8), head=nn.Linear(192, 4)), (image(),)
