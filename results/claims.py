"""The claims: each compares two arms of runs, seed by seed, and says what was published about them."""

from typing import NamedTuple

Side = tuple[str, str, str]  # group, arm, level


class Claim(NamedTuple):
    """A difference, positive where the first side is better, and what is claimed of it."""

    section: str
    text: str
    better: tuple[Side, ...]  # sides whose gain counts
    worse: tuple[Side, ...]  # sides over which it counts
    says: str  # ">", "<", ">=" (the same or better), "<=", or "" for a control
    number: str = ""  # in published.toml
    source: str = ""  # of a claim without a number


class Section(NamedTuple):
    """A heading and what one has to know about its runs."""

    title: str
    about: str


_LENET = "LeNet-300-100 on MNIST-5k."
_SMALL = "An MLP (40-128-128-10) on MNIST-1D."
_CONV = "A convnet of three layers with batch norm on MNIST-5k, 24,080 weights."
_TEXT = "A transformer of two blocks on the text of Python's standard library; in bits per character."

SECTIONS = {
    "methods": Section("Methods", f"{_LENET} Each has a learning rate of its own, and ERK where layers have shares."),
    "start": Section(
        "RigL, static masks, and the start",
        f"{_LENET} A static mask leaves units a few of their inputs, and He's weights are then too small; with a "
        "scaled start (here: scaled) each layer is divided by the root of its density. What RigL gains over a plain "
        "static mask is in part this start.",
    ),
    "before": Section("Masks before training", f"{_LENET} And {_CONV[0].lower()}{_CONV[1:]}"),
    "tickets": Section("Lottery tickets", f"{_LENET} Seven rounds, back to the weights of step 10."),
    "layout": Section(
        "ERK and uniform",
        f"{_CONV} Uniform leaves the first layer dense, as in the papers, and keeps as many weights as ERK; for equal "
        "FLOPs ERK keeps fewer or more.",
    ),
    "longer": Section("Longer training", f"{_SMALL} 3 % kept."),
    "itop": Section(
        "Exploration within a method",
        f"{_SMALL} 3 % kept. Masks change every 60th part of a run, or every 4th; the shares of the weights that were "
        "ever kept are below.",
    ),
    "nm": Section(
        "N of M",
        f"{_SMALL} ASP trains half of the steps dense and half pruned, or as many as SR-STE has of both.",
    ),
    "ensembles": Section("Ensembles of equal size", f"{_SMALL} Their parameters add up to those of the dense network."),
    "filters": Section(
        "Filters",
        f"{_CONV} Half of the filters of each layer go while it trains; a network that is born with half of them has "
        "the same shapes, and as many steps, or as much time.",
    ),
    "data": Section(
        "Pruning with data", f"{_TEXT} Blocks of the trained model are pruned in order, none is trained again."
    ),
    "low rank": Section(
        "Low-rank updates",
        f"{_TEXT} Pruned to 70 % by SparseGPT, then tuned; all have the same zeros at the end.",
    ),
    "collapse": Section(
        "Layer collapse",
        "An MLP with six hidden layers of 100 on scikit-learn's digits, pruned before training. The difference is in "
        "powers of ten of the largest compression that leaves a path from input to output.",
    ),
}

PAI = "2009.08576, abstract"
LEVELS = ("1", "2", "3", "5", "10")
SHOWN = {  # how arms of LeNet are named in a difference
    "scaled start": "scaled {}",
    "shuffled": "shuffled {}",
    "shuffled within inputs": "{} shuffled within inputs",
    "temperature 1": "{} at temperature 1",
    "other weights": "its mask, other weights",
    "shuffled mask": "its weights, shuffled mask",
}


def _pair(section: str, text: str, a: Side, b: Side, says: str, number: str = "", source: str = "") -> Claim:
    return Claim(section, text, (a,), (b,), says, number, source)


def _lenet() -> list[Claim]:
    def two(a: str, b: str, k: str, says: str, number: str = "", source: str = "", section: str = "methods") -> Claim:
        names = [SHOWN.get(name.split(", ")[-1], "{}").format(name.split(", ")[0]) for name in (a, b)]
        text = f"{' - '.join(names)}, {k} %"
        return _pair(section, text, ("lenet", a, k), ("lenet", b, k), says, number, source)

    numbered = {("gmp", "10"), ("gmp", "5")}
    found = []
    for k in LEVELS:
        found.append(two("SNFS", "SET", k, ">", f"snfs-set-{k}"))
    for k in LEVELS:
        found.append(two("RigL", "SET", k, ">", source="1911.11134"))
    for k in LEVELS:
        number = f"gmp-rigl-{k}" if ("gmp", k) in numbered else ""
        found.append(two("GMP", "RigL", k, ">", number, "" if number else "1911.11134, at 5 % and 10 %"))
    found += [two("DSR", "SET", k, ">", f"dsr-set-{k}") for k in LEVELS]
    found += [two("DeepR", "SET", k, says, f"deepr-set-{k}") for k, says in zip(LEVELS[1:], ">><<", strict=True)]
    for k in LEVELS:
        number = f"rigl-static-{k}" if k in ("5", "10") else ""
        found.append(two("RigL", "static", k, ">", number, "" if number else "1911.11134", "start"))
    grown = tuple(("lenet", arm, k) for arm, k in (("RigL", "1"), ("static", "10")))
    lost = tuple(("lenet", arm, k) for arm, k in (("static", "1"), ("RigL", "10")))
    text = "(RigL - static at 1 %) - (at 10 %)"
    found.append(Claim("start", text, grown, lost, ">", "rigl-static-growth"))
    scaled = "static, scaled start"
    for k in LEVELS:
        found.append(two(scaled, "static", k, "", section="start"))
        found.append(two("RigL", scaled, k, "", section="start"))
        found.append(two("RigL, scaled start", scaled, k, "", section="start"))
    for name in ("SNIP", "GraSP", "SynFlow"):
        found.append(two(f"{name}, shuffled", name, "3", ">=", source=PAI, section="before"))
        found.append(two(f"{name}, shuffled within inputs", name, "3", "", section="before"))
        found.append(two("IMP", name, "3", ">", source=PAI, section="before"))
    found.append(two("GraSP", "GraSP, temperature 1", "3", "", section="before"))
    source = "1803.03635, abstract"
    for how in ("other weights", "shuffled mask"):
        found.append(two("IMP", f"ticket, {how}", "3", ">", source=source, section="tickets"))
    for k in LEVELS:
        a, b = ("lenet", "IMP", k), ("lenet", "dense", "100")
        says, where = (">=", f"{source}: at 10-20 % and above") if k == "10" else ("", "")
        found.append(_pair("tickets", f"IMP, {k} % - dense", a, b, says, source=where))
    return found


def _conv() -> list[Claim]:
    found = []
    for name in ("SNIP", "SynFlow"):
        for k in ("20", "5"):
            a, b = ("conv", f"{name}, shuffled", k), ("conv", name, k)
            found.append(_pair("before", f"shuffled {name} - {name}, {k} %, convnet", a, b, ">=", source=PAI))
    for method in ("RigL", "static"):
        for k in ("20", "10"):
            uniform = ("conv", f"{method}, uniform", k)
            equal = ("conv", f"{method}, ERK", k)
            flops = ("conv", f"{method}, ERK of equal FLOPs", k)
            number = f"erk-uniform-{k}" if method == "RigL" else ""
            other = "erk-uniform-flops" if (method, k) == ("RigL", "20") else ""
            says = "<" if other else ""
            source = "" if number else "1911.11134, with RigL"
            found.append(_pair("layout", f"ERK - uniform, {k} %, {method}", equal, uniform, ">", number, source))
            found.append(_pair("layout", f"ERK - uniform, equal FLOPs, {k} %, {method}", flops, uniform, says, other))
    pruned = ("conv", "filters pruned", "half")
    source = "1810.05270, abstract"
    for arm, text in (("narrow", "as many steps"), ("narrow, as long", "as much time")):
        text = f"half pruned - born narrow, {text}"
        found.append(_pair("filters", text, pruned, ("conv", arm, "half"), "<=", source=source))
    found.append(_pair("filters", "half pruned - dense", pruned, ("conv", "dense", "100"), ""))
    return found


def _small() -> list[Claim]:
    def side(arm: str, level: str) -> Side:
        return ("small", arm, level)

    found = []
    for method, number in (("RigL", "rigl-longer"), ("static", "static-longer"), ("GMP", "")):
        source = "" if number else "1911.11134, figure 4"
        text = f"{method}: 3x as long - 1x"
        found.append(_pair("longer", text, side(method, "3x"), side(method, "1x"), ">", number, source))
    text, source = "RigL, 3x as long - GMP, 1x", "1911.11134, at 5x"
    found.append(_pair("longer", text, side("RigL", "3x"), side("GMP", "1x"), ">", source=source))
    for k in ("1x", "3x"):
        found.append(_pair("longer", f"GMP - RigL, {k}", side("GMP", k), side("RigL", k), ""))
        found.append(_pair("longer", f"RigL - static, {k}", side("RigL", k), side("static", k), ""))
    for method, number in (("RigL", "itop-rigl"), ("SET", "")):
        source = "" if number else "2102.02887"
        often, seldom = side(method, "a 60th"), side(method, "a 4th")
        text = f"{method}: every 60th - every 4th"
        found.append(_pair("itop", text, often, seldom, ">", number, source))
    for shape in ("2:4", "1:8"):
        for other in ("STE", "ASP", "ASP, twice as long"):
            text, source = f"SR-STE - {other}, {shape}", "2102.04010, abstract"
            source = source if other == "STE" else "2102.04010"
            found.append(_pair("nm", text, side("SR-STE", shape), side(other, shape), ">", source=source))
    for members in ("4", "16"):
        text, source = f"{members} RigL networks at 1/{members} - dense", "2106.14568, abstract"
        found.append(_pair("ensembles", text, side("ensemble", members), side("dense", "100"), ">", source=source))
    return found


def _text() -> list[Claim]:
    def side(arm: str, level: str) -> Side:
        return ("text", arm, level)

    found = []
    for level, key in (("50", "50"), ("2:4", "24"), ("70", "")):
        shown = level if ":" in level else f"{level} % pruned"
        for a, b in (("SparseGPT", "magnitude"), ("Wanda", "magnitude"), ("SparseGPT", "Wanda")):
            number = f"{a.lower()}-{b.lower()}-{key}" if key else ""
            says = "<" if (b, key) == ("Wanda", "50") else ">"
            source = "" if key else "2306.11695, at 50 % and 2:4"
            if not key and b == "Wanda":
                says = source = ""
            found.append(_pair("data", f"{a} - {b}, {shown}", side(a, level), side(b, level), says, number, source))
    keeps = side("low rank, keeps zeros", "70")
    for other, says in (("masked at the end", ">"), ("kept weights", "")):
        text = f"keeps zeros - {other}"
        arm = f"low rank, {other}" if says else other
        source = "the recipe of this library" if says else ""
        found.append(_pair("low rank", text, keeps, side(arm, "70"), says, source=source))
    found.append(_pair("low rank", "keeps zeros - not tuned", keeps, side("SparseGPT", "70"), ""))
    return found


def _collapse() -> list[Claim]:
    ours = ("collapse", "SynFlow", "reach")
    others = ("random", "magnitude", "SNIP", "GraSP")
    source = "2006.05467, abstract"
    return [
        _pair("collapse", f"SynFlow - {other}", ours, ("collapse", other, "reach"), ">", source=source)
        for other in others
    ]


CLAIMS = [*_lenet(), *_conv(), *_small(), *_text(), *_collapse()]
