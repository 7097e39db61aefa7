"""The claims: each compares two arms of runs, seed by seed, and says what was published
about them.
"""

from typing import NamedTuple

from results.recovery import WAYS

Side = tuple[str, str, str]  # group, arm, level


class Claim(NamedTuple):
    """A difference, positive where the first side is better, and what is claimed of
    it.
    """

    section: str
    text: str
    better: tuple[Side, ...]  # sides whose gain counts
    worse: tuple[Side, ...]  # sides over which it counts
    says: str  # ">", "<", ">=" (the same or better), "<=", or "" for a control
    number: str = ""  # in published.toml
    source: str = ""  # of a claim without a number
    words: str = ""  # the claim as a sentence, shared by its cases; "" for a control
    case: str = ""  # where it is claimed


class Section(NamedTuple):
    """A heading and what one has to know about its runs."""

    title: str
    about: str


_LENET = "LeNet-300-100 on MNIST-5k."
_SMALL = "An MLP (40-128-128-10) on MNIST-1D."
_CONV = "A convnet of three layers with batch norm on MNIST-5k, 24,080 weights."
_TEXT = (
    "A transformer of two blocks on the text of Python's standard library; in bits "
    "per character."
)

SECTIONS = {
    "methods": Section(
        "Methods",
        f"{_LENET} Each has a learning rate of its own, and ERK where layers have "
        "shares.",
    ),
    "start": Section(
        "RigL, static masks, and the start",
        f"{_LENET} A static mask leaves units a few of their inputs, and He's weights "
        "are then too small; with a scaled start (here: scaled) each layer is "
        "divided by the root of its density. What RigL gains over a plain static "
        "mask is in part this start.",
    ),
    "before": Section(
        "Masks before training", f"{_LENET} And {_CONV[0].lower()}{_CONV[1:]}"
    ),
    "tickets": Section(
        "Lottery tickets", f"{_LENET} Seven rounds, back to the weights of step 10."
    ),
    "layout": Section(
        "ERK and uniform",
        f"{_CONV} Uniform leaves the first layer dense, as in the papers, and keeps "
        "as many weights as ERK; for equal FLOPs ERK keeps fewer or more.",
    ),
    "longer": Section("Longer training", f"{_SMALL} 3 % kept."),
    "itop": Section(
        "Exploration within a method",
        f"{_SMALL} 3 % kept. Masks change every 60th part of a run, or every 4th; the "
        "shares of the weights that were ever kept are below.",
    ),
    "nm": Section(
        "N of M",
        f"{_SMALL} ASP trains half of the steps dense and half pruned, or as many as "
        "SR-STE has of both.",
    ),
    "ensembles": Section(
        "Ensembles of equal size",
        f"{_SMALL} The networks of an ensemble together have as many parameters as the "
        "dense network.",
    ),
    "filters": Section(
        "Filters",
        f"{_CONV} Half of the filters of each layer go while it trains; a network "
        "that is born with half of them has the same shapes, and as many steps, or "
        "as much time.",
    ),
    "data": Section(
        "Pruning with data",
        f"{_TEXT} Blocks of the trained model are pruned in order, none is trained "
        "again.",
    ),
    "low rank": Section(
        "Low-rank updates",
        f"{_TEXT} Pruned to 70 % by SparseGPT, then tuned; all have the same zeros at "
        "the end.",
    ),
    "learned": Section(
        "Learned masks of a tiny LLaMA",
        "A LLaMA of two blocks of width 32 on the text of Python's standard library, "
        "in bits per character; each seed has a model, a text and windows of its own. "
        "Its 21,504 weights in blocks are pruned with 1,024 windows of 64 characters, "
        "which every method reads. Only SparseGPT changes weights. Learned masks have "
        "100 steps of 16 windows and a learning rate that is tuned on one seed; "
        "all but ProxSparse's start at Wanda's masks. MaskPro has the best of three "
        "rates, as rates towards 0 only keep Wanda's masks. MaskLLM has no "
        "reward for the norm of the weights that it keeps (norm=0.0). ProxSparse's "
        "strength, 0.05, and the scale of MaskPro's first logits, 3, were chosen by "
        "hand on that seed.",
    ),
    "recovery": Section(
        "Recovery of a tiny LLaMA",
        "A LLaMA of two blocks on the text of Python's standard library, in bits per "
        "character. SparseGPT prunes 70 %, then the kept weights are trained for 80 "
        "steps of the same batches: by the labels (fine-tuned), by the dense model's "
        "logits, by these and the hidden states of its blocks, or block by block, "
        "each with 80 steps. Each way has the best of three or more learning rates, "
        "a factor of two apart, on one seed of the data for tuning.",
    ),
    "recovery_convnet": Section(
        "Recovery of a convnet",
        f"{_CONV} One magnitude for all weights leaves 10 % of them, which are trained "
        "for 80 steps, as the LLaMA's.",
    ),
    "collapse": Section(
        "Layer collapse",
        "An MLP with six hidden layers of 100 on scikit-learn's digits, pruned before "
        "training. The difference is in powers of ten of the largest compression that "
        "leaves a path from input to output.",
    ),
}

PAI = "2009.08576, abstract"
SHUFFLES = (
    "A mask shuffled within its layers is as good as the mask chosen before training"
)
LEVELS = ("1", "2", "3", "5", "10")
SHOWN = {  # how arms of LeNet are named in a difference
    "scaled start": "scaled {}",
    "shuffled": "shuffled {}",
    "shuffled within inputs": "{} shuffled within inputs",
    "temperature 1": "{} at temperature 1",
    "other weights": "its mask, other weights",
    "shuffled mask": "its weights, shuffled mask",
}


def _pair(
    section: str,
    text: str,
    a: Side,
    b: Side,
    says: str,
    number: str = "",
    source: str = "",
    words: str = "",
    case: str = "",
) -> Claim:
    return Claim(section, text, (a,), (b,), says, number, source, words, case)


def _lenet() -> list[Claim]:
    def two(
        a: str,
        b: str,
        k: str,
        says: str,
        number: str = "",
        source: str = "",
        section: str = "methods",
        words: str = "",
        case: str = "",
    ) -> Claim:
        names = [
            SHOWN.get(name.split(", ")[-1], "{}").format(name.split(", ")[0])
            for name in (a, b)
        ]
        text = f"{' - '.join(names)}, {k} %"
        sides = ("lenet", a, k), ("lenet", b, k)
        return _pair(
            section, text, *sides, says, number, source, words, case or f"{k} %"
        )

    numbered = {("gmp", "10"), ("gmp", "5")}
    found = []
    for k in LEVELS:
        found.append(
            two("SNFS", "SET", k, ">", f"snfs-set-{k}", words="SNFS beats SET")
        )
    for k in LEVELS:
        found.append(
            two("RigL", "SET", k, ">", source="1911.11134", words="RigL beats SET")
        )
    for k in LEVELS:
        number = f"gmp-rigl-{k}" if ("gmp", k) in numbered else ""
        source = "" if number else "1911.11134, at 5 % and 10 %"
        found.append(
            two(
                "GMP",
                "RigL",
                k,
                ">",
                number,
                source,
                words="Gradual pruning (GMP) beats RigL",
            )
        )
    for k in LEVELS:
        found.append(two("DSR", "SET", k, ">", f"dsr-set-{k}", words="DSR beats SET"))
    for k, says in zip(LEVELS[1:], ">><<", strict=True):
        words = "DeepR beats SET" if says == ">" else "SET beats DeepR"
        found.append(two("DeepR", "SET", k, says, f"deepr-set-{k}", words=words))
    for k in LEVELS:
        number = f"rigl-static-{k}" if k in ("5", "10") else ""
        source = "" if number else "1911.11134"
        found.append(
            two(
                "RigL",
                "static",
                k,
                ">",
                number,
                source,
                "start",
                "RigL beats a random mask that stays",
            )
        )
    grown = tuple(("lenet", arm, k) for arm, k in (("RigL", "1"), ("static", "10")))
    lost = tuple(("lenet", arm, k) for arm, k in (("static", "1"), ("RigL", "10")))
    text = "(RigL - static at 1 %) - (at 10 %)"
    words = "RigL leads a random mask that stays by more, the fewer weights are kept"
    found.append(
        Claim(
            "start",
            text,
            grown,
            lost,
            ">",
            "rigl-static-growth",
            words=words,
            case="1 % against 10 %",
        )
    )
    scaled = "static, scaled start"
    for k in LEVELS:
        found.append(two(scaled, "static", k, "", section="start"))
        found.append(two("RigL", scaled, k, "", section="start"))
        found.append(two("RigL, scaled start", scaled, k, "", section="start"))
    for name in ("SNIP", "GraSP", "SynFlow"):
        shuffled = {"words": SHUFFLES, "case": f"{name}, 3 %"}
        tickets = {
            "words": "Lottery tickets (IMP) beat masks chosen before training",
            "case": f"{name}, 3 %",
        }
        found.append(
            two(
                f"{name}, shuffled",
                name,
                "3",
                ">=",
                source=PAI,
                section="before",
                **shuffled,
            )
        )
        found.append(
            two(f"{name}, shuffled within inputs", name, "3", "", section="before")
        )
        found.append(
            two("IMP", name, "3", ">", source=PAI, section="before", **tickets)
        )
    found.append(two("GraSP", "GraSP, temperature 1", "3", "", section="before"))
    source = "1803.03635, abstract"
    lacks = {
        "other weights": "A ticket needs its initial weights",
        "shuffled mask": "A ticket needs its mask",
    }
    for how, words in lacks.items():
        found.append(
            two(
                "IMP",
                f"ticket, {how}",
                "3",
                ">",
                source=source,
                section="tickets",
                words=words,
            )
        )
    words = "A ticket is as good as the dense network"
    for k in LEVELS:
        a, b = ("lenet", "IMP", k), ("lenet", "dense", "100")
        claimed = {
            "says": ">=",
            "source": f"{source}: at 10-20 % and above",
            "words": words,
            "case": "10 %",
        }
        if k != "10":
            claimed = {"says": ""}
        found.append(_pair("tickets", f"IMP, {k} % - dense", a, b, **claimed))
    return found


def _conv() -> list[Claim]:
    found = []
    for name in ("SNIP", "SynFlow"):
        for k in ("20", "5"):
            a, b = ("conv", f"{name}, shuffled", k), ("conv", name, k)
            text, case = (
                f"shuffled {name} - {name}, {k} %, convnet",
                f"{name}, convnet, {k} %",
            )
            found.append(
                _pair("before", text, a, b, ">=", source=PAI, words=SHUFFLES, case=case)
            )
    for method in ("RigL", "static"):
        for k in ("20", "10"):
            uniform = ("conv", f"{method}, uniform", k)
            equal = ("conv", f"{method}, ERK", k)
            flops = ("conv", f"{method}, ERK of equal FLOPs", k)
            number = f"erk-uniform-{k}" if method == "RigL" else ""
            source = "" if number else "1911.11134, with RigL"
            text, case = f"ERK - uniform, {k} %, {method}", f"{method}, {k} %"
            words = "ERK beats uniform shares, with as many weights"
            found.append(
                _pair("layout", text, equal, uniform, ">", number, source, words, case)
            )
            text = f"ERK - uniform, equal FLOPs, {k} %, {method}"
            if (method, k) == ("RigL", "20"):
                words = "Uniform shares beat ERK, with as many FLOPs"
                found.append(
                    _pair(
                        "layout",
                        text,
                        flops,
                        uniform,
                        "<",
                        "erk-uniform-flops",
                        words=words,
                        case=case,
                    )
                )
            else:
                found.append(_pair("layout", text, flops, uniform, ""))
    pruned = ("conv", "filters pruned", "half")
    source = "1810.05270, abstract"
    words = "A network born narrow is as good as one whose filters are pruned"
    for arm, case in (("narrow", "as many steps"), ("narrow, as long", "as much time")):
        text, narrow = f"half pruned - born narrow, {case}", ("conv", arm, "half")
        found.append(
            _pair(
                "filters",
                text,
                pruned,
                narrow,
                "<=",
                source=source,
                words=words,
                case=case,
            )
        )
    found.append(
        _pair("filters", "half pruned - dense", pruned, ("conv", "dense", "100"), "")
    )
    return found


def _small() -> list[Claim]:
    def side(arm: str, level: str) -> Side:
        return ("small", arm, level)

    found = []
    words = "Three times the steps lower the error"
    for method, number in (
        ("RigL", "rigl-longer"),
        ("static", "static-longer"),
        ("GMP", ""),
    ):
        source = "" if number else "1911.11134, figure 4"
        text, long, short = (
            f"{method}: 3x as long - 1x",
            side(method, "3x"),
            side(method, "1x"),
        )
        found.append(
            _pair("longer", text, long, short, ">", number, source, words, method)
        )
    text, source = "RigL, 3x as long - GMP, 1x", "1911.11134, at 5x"
    words = "RigL with more steps beats gradual pruning"
    a, b = side("RigL", "3x"), side("GMP", "1x")
    found.append(
        _pair(
            "longer", text, a, b, ">", source=source, words=words, case="3x the steps"
        )
    )
    for k in ("1x", "3x"):
        found.append(
            _pair("longer", f"GMP - RigL, {k}", side("GMP", k), side("RigL", k), "")
        )
        found.append(
            _pair(
                "longer", f"RigL - static, {k}", side("RigL", k), side("static", k), ""
            )
        )
    words = "Masks that change more often end with a lower error"
    for method, number in (("RigL", "itop-rigl"), ("SET", "")):
        source = "" if number else "2102.02887"
        text, often, seldom = (
            f"{method}: every 60th - every 4th",
            side(method, "a 60th"),
            side(method, "a 4th"),
        )
        found.append(
            _pair("itop", text, often, seldom, ">", number, source, words, method)
        )
    for shape in ("2:4", "1:8"):
        for other in ("STE", "ASP", "ASP, twice as long"):
            text, source = f"SR-STE - {other}, {shape}", "2102.04010, abstract"
            source = source if other == "STE" else "2102.04010"
            words, sides = (
                f"SR-STE beats {other}",
                (side("SR-STE", shape), side(other, shape)),
            )
            found.append(
                _pair("nm", text, *sides, ">", source=source, words=words, case=shape)
            )
    words = "Sparse networks, averaged, beat one dense network with as many weights"
    for members in ("4", "16"):
        text, source = (
            f"{members} RigL networks at 1/{members} - dense",
            "2106.14568, abstract",
        )
        sides, case = (
            (side("ensemble", members), side("dense", "100")),
            f"{members} networks",
        )
        found.append(
            _pair("ensembles", text, *sides, ">", source=source, words=words, case=case)
        )
    return found


def _text() -> list[Claim]:
    def side(arm: str, level: str) -> Side:
        return ("text", arm, level)

    found = []
    for level, key in (("50", "50"), ("2:4", "24"), ("70", "")):
        shown = level if ":" in level else f"{level} % pruned"
        for a, b in (
            ("SparseGPT", "magnitude"),
            ("Wanda", "magnitude"),
            ("SparseGPT", "Wanda"),
        ):
            number = f"{a.lower()}-{b.lower()}-{key}" if key else ""
            source = "" if key else "2306.11695, at 50 % and 2:4"
            says, words = ">", f"{a} beats {b}"
            if (b, key) == ("Wanda", "50"):
                says, words = "<", "Wanda beats SparseGPT"
            text, sides = f"{a} - {b}, {shown}", (side(a, level), side(b, level))
            if key or b != "Wanda":
                found.append(
                    _pair("data", text, *sides, says, number, source, words, shown)
                )
            else:
                found.append(_pair("data", text, *sides, ""))
    keeps, source = side("low rank, keeps zeros", "70"), "the recipe of this library"
    text, other = (
        "keeps zeros - masked at the end",
        side("low rank, masked at the end", "70"),
    )
    words = "Low-rank updates that keep the zeros beat a mask after tuning"
    found.append(
        _pair(
            "low rank",
            text,
            keeps,
            other,
            ">",
            source=source,
            words=words,
            case="70 % pruned",
        )
    )
    found.append(
        _pair(
            "low rank",
            "keeps zeros - kept weights",
            keeps,
            side("kept weights", "70"),
            "",
        )
    )
    found.append(
        _pair("low rank", "keeps zeros - not tuned", keeps, side("SparseGPT", "70"), "")
    )
    return found


def _learned() -> list[Claim]:
    def side(arm: str, level: str) -> Side:
        return ("learned", arm, level)

    def shown(level: str) -> str:
        return level if ":" in level else f"{level} % pruned"

    sources = {
        ("MaskLLM", "2:4"): "2409.17481, abstract",
        ("ProxSparse", "2:4"): "2502.00258, abstract",
        ("MaskPro", "2:4"): "2506.12876, abstract",
        ("LEAP", "50"): "2605.17289, abstract",
    }
    found = []
    for (arm, level), source in sources.items():
        for other in ("Wanda", "SparseGPT"):
            found.append(
                _pair(
                    "learned",
                    f"{arm} - {other}, {shown(level)}",
                    side(arm, level),
                    side(other, level),
                    ">",
                    source=source,
                    words=f"masks that are learned by {arm} beat masks of one pass",
                    case=f"{other}'s",
                )
            )
    for arm, other, level in (
        ("RIA", "Wanda", "2:4"),
        ("RIA", "Wanda", "50"),
        ("Wanda, permuted", "Wanda", "2:4"),
        ("Wanda, swaps", "Wanda", "2:4"),
        ("SparseGPT", "Wanda", "2:4"),
        ("SparseGPT", "Wanda", "50"),
    ):
        text = f"{arm} - {other}, {shown(level)}, LLaMA"
        found.append(_pair("learned", text, side(arm, level), side(other, level), ""))
    return found


def _recovery() -> list[Claim]:
    found = []
    for section, model, level in (
        ("recovery", "LLaMA", "70"),
        ("recovery_convnet", "convnet", "90"),
    ):
        sides = {
            way: ("recovery", f"{model}, {way}", level) for way in ("pruned", *WAYS)
        }
        tuned, logits, both, by_block = WAYS
        for a, b, says, source, words in (
            (
                logits,
                tuned,
                ">",
                "2407.14679, sec. 3",
                "A pruned model learns more from the dense model than from labels",
            ),
            (
                by_block,
                "pruned",
                ">",
                "2402.12419, abstract",
                "Blocks that learn to answer as before make a pruned model better",
            ),
            (both, logits, "", "", ""),
            (by_block, tuned, "", "", ""),
            (tuned, "pruned", "", "", ""),
        ):
            case = f"a {model} at {level} % pruned" if says else ""
            found.append(
                _pair(
                    section,
                    f"{a} - {b}, {model}",
                    sides[a],
                    sides[b],
                    says,
                    source=source,
                    words=words,
                    case=case,
                )
            )
    return found


def _collapse() -> list[Claim]:
    ours, source = ("collapse", "SynFlow", "reach"), "2006.05467, abstract"
    words = "SynFlow keeps a path from input to output at higher compression"
    found = []
    for name in ("random", "magnitude", "SNIP", "GraSP"):
        text, other = f"SynFlow - {name}", ("collapse", name, "reach")
        found.append(
            _pair(
                "collapse",
                text,
                ours,
                other,
                ">",
                source=source,
                words=words,
                case=f"than {name}",
            )
        )
    return found


CLAIMS = [
    *_lenet(),
    *_conv(),
    *_small(),
    *_text(),
    *_learned(),
    *_recovery(),
    *_collapse(),
]
