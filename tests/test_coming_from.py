"""docs/coming-from: every public name of the five systems has a row, and the expression in every row runs."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_docs import split

FOLDER = Path(__file__).parents[1] / "docs" / "coming-from"
PAGES = sorted(FOLDER.glob("*.md"))
HEADER = "| name | in sparsefn | what differs |"

# The names that a page must have a row for. A member is written `Class.member`; a row may leave the class away.
NAMES = {
    "cerebras": """
        make_mask_topk_sparsity make_mask_drop_minimum make_mask_grow_maximum
        ScoreShaper ScoreFlattener OutputGroupScoreShaper InputGroupScoreShaper
        HyperParameterSchedule Constant Linear Exp Power Cosine Cycling Lambda make_hyperparam_schedule
        HyperParameterSchedule.compute HyperParameterSchedule.get_min_max_end HyperParameterSchedule.update
        HyperParameterSchedule.cache_clear HyperParameterSchedule.visit_state
        HyperParameterSchedule.state_dict HyperParameterSchedule.load_state_dict
        UpdateSchedule UpdateSchedule.is_update_step FreqSchedule ListSchedule make_update_schedule
        random topk from_zeros checkerboard make_init_method
        SparsityAlgorithm SparsityAlgorithm.sparsity SparsityAlgorithm.num_sparse_params
        SparsityAlgorithm.get_sparse_params SparsityAlgorithm.initialize SparsityAlgorithm.sparsify_parameter
        SparsityAlgorithm.apply SparsityAlgorithm.sparsify_module SparsityAlgorithm.prune_weight
        SparsityAlgorithm.sparsify_optimizer SparsityAlgorithm.update SparsityAlgorithm.csx_annotate_sparsity
        SparsityAlgorithm.register_target_sparsity_hook SparsityAlgorithm.register_computed_sparsity_hook
        SparsityAlgorithm.visit_state SparsityAlgorithm.state_dict SparsityAlgorithm.load_state_dict
        SparsityAlgorithm.name
        Static DynamicSparsityAlgorithm DynamicSparsityAlgorithm.update_mask GMP SET RigL
        Group Group.add Group.extend configure map_sparsity_algorithm default_sparse_param_filter
    """,
    "dmx": """
        Sparseness Sparseness.get_mask Sparseness.from_shorthand Sparseness.blocked Sparseness.backward
        Dense TopK BlockTopK Bernoulli BTK8_4_LD BTK8_4_FD BTK8_2_LD BTK8_2_FD
        Sparsify Sparsify.configure Sparsify.forward Sparsify.update_mask Sparsify.density Sparsify.mask_str
        STE supermask joint LazySparsify LazySparsify.reset_parameters LazySparsify.initialize_parameters
        SparsificationManager SparsificationManager.step
        WeightSparseMixin WeightSparseMixin.init_sparsifier WeightSparseMixin.effective_weight
        WeightSparseMixin.weight_sparseness WeightSparseMixin.check_sparseness_dim_consistency
        mask2braille
    """,
    "sparselearning": """
        Decay Decay.mode CosineDecay CosineDecay.step LinearDecay LinearDecay.step get_dr
        MagnitudePruneDecay MagnitudePruneDecay.step MagnitudePruneDecay.cumulative_sparsity
        decay.cosine decay.linear decay.magnitude-prune
        magnitude_prune global_magnitude_prune struct_magnitude_prune
        prune.magnitude prune.global-magnitude prune.struct-magnitude-mean prune.struct-magnitude-max
        prune_threshold growth_threshold increment growth_increment tolerance
        momentum_growth abs_grad_growth random_growth no_growth struct_abs_grad_growth
        grow.momentum grow.absolute-gradient grow.random grow.none
        grow.struct-absolute-gradient-mean grow.struct-absolute-gradient-min
        momentum_redistribution grad_redistribution nonzero_redistribution
        redistribute.momentum redistribute.grad redistribute.nonzero redistribute.none
        adjust_prune_rate adjusted_growth
        Masking Masking.update_connections Masking.step Masking.remove_weight Masking.remove_weight_partial_name
        Masking.remove_type step_end epoch_end mask_step baseline_nonzero total_params total_density
        SET RigL SNFS Pruning Static Lottery
        get_erdos_renyi_dist erdos_renyi_init random_init resume_init lottery_ticket_init
        struct_erdos_renyi_init struct_random_init
        init.erdos-renyi init.erdos-renyi-kernel init.random init.resume init.lottery-ticket init.lottery-ticket-dist
        init.struct-erdos-renyi init.struct-erdos-renyi-kernel init.struct-random
    """,
    "torch-ao": """
        BaseSparsifier BaseSparsifier.prepare BaseSparsifier.step BaseSparsifier.update_mask
        BaseSparsifier.squash_mask BaseSparsifier.make_config_from_model BaseSparsifier.convert
        BaseSparsifier.state_dict BaseSparsifier.load_state_dict
        FakeSparsity module_to_fqn fqn_to_module get_arg_info_from_tensor_fqn module_contains_param swap_module
        get_static_sparse_quantized_mapping get_dynamic_sparse_quantized_mapping
        WeightNormSparsifier WeightNormSparsifier.update_mask NearlyDiagonalSparsifier
        BaseScheduler BaseScheduler.get_sl BaseScheduler.get_last_sl BaseScheduler.print_sl BaseScheduler.step
        BaseScheduler.state_dict BaseScheduler.load_state_dict CubicSL LambdaSL
        BaseDataSparsifier BaseDataSparsifier.prepare BaseDataSparsifier.add_data BaseDataSparsifier.step
        BaseDataSparsifier.update_mask BaseDataSparsifier.get_mask BaseDataSparsifier.get_data
        BaseDataSparsifier.squash_mask BaseDataSparsifier.state_dict BaseDataSparsifier.load_state_dict
        DataNormSparsifier BaseDataScheduler BaseDataScheduler.get_schedule_param BaseDataScheduler.get_last_param
        BaseDataScheduler.step BaseDataScheduler.state_dict BaseDataScheduler.load_state_dict
        PostTrainingDataSparsity TrainingAwareDataSparsity post_training_sparse_quantize
        ActivationSparsifier ActivationSparsifier.register_layer ActivationSparsifier.unregister_layer
        ActivationSparsifier.step ActivationSparsifier.update_mask ActivationSparsifier.squash_mask
        ActivationSparsifier.get_mask ActivationSparsifier.state_dict ActivationSparsifier.load_state_dict
        BaseStructuredSparsifier BaseStructuredSparsifier.prepare BaseStructuredSparsifier.step
        BaseStructuredSparsifier.make_config_from_model BaseStructuredSparsifier.prune
        BaseStructuredSparsifier.squash_mask SaliencyPruner LSTMSaliencyPruner FPGMPruner FakeStructuredSparsity
        BiasHook
    """,
    "torch-prune": """
        Identity identity RandomUnstructured random_unstructured L1Unstructured l1_unstructured
        RandomStructured random_structured LnStructured ln_structured CustomFromMask custom_from_mask
        PruningContainer PruningContainer.add_pruning_method
        BasePruningMethod BasePruningMethod.PRUNING_TYPE BasePruningMethod.compute_mask BasePruningMethod.apply
        BasePruningMethod.apply_mask BasePruningMethod.__call__ BasePruningMethod.prune BasePruningMethod.remove
        global_unstructured remove is_pruned
    """,
}


class Row(NamedTuple):
    line: int
    names: list[str]
    code: str


def stem(page: Path) -> str:
    return page.stem.replace("_", "-")


def rows(text: str) -> list[Row]:
    """The rows of the one table of a page; ValueError for a row of another form."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            names = [name.split("(")[0] for name in re.findall(r"`([^`]+)`", cells[0])]
            if len(cells) != 3 or not re.fullmatch(r"`[^`]+`", cells[1]) or not cells[2]:
                raise ValueError(f"line {number}: expected | `name` | `code` | what differs |, got {line}")
            found.append(Row(number, names, cells[1].strip("`")))
    return found


def same(a: str, b: str) -> bool:
    """Whether two names may mean one thing: the last parts agree, and the classes where both say one."""
    left, right = a.split("."), b.split(".")
    return left[-1] == right[-1] and (len(left) == 1 or len(right) == 1 or left[-2] == right[-2])


def missing(names: str, table: list[Row]) -> list[str]:
    """The names without a row."""
    shown = [name for row in table for name in row.names]
    return [name for name in names.split() if not any(same(name, other) for other in shown)]


def namespace(text: str, filename: str) -> dict[str, Any]:
    """The names that the Python blocks of a page define."""
    found: dict[str, Any] = {"__name__": "__main__"}
    for block in split(text)[1]:
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.code, filename, "exec"), found)
    return found


def test_every_name_has_a_row() -> None:
    gone = {stem(page): missing(NAMES[stem(page)], rows(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: names for page, names in gone.items() if names} == {}


def unread(text: str) -> list[str]:
    """What is wrong with the table of a page: there is another, or none, or lines that are no rows."""
    lines = text.splitlines()
    if lines.count(HEADER) != 1:
        return [f"{lines.count(HEADER)} tables"]
    start = lines.index(HEADER)
    wrong = [] if re.fullmatch(r"\|( ?-+ ?\|){3}", lines[start + 1]) else [lines[start + 1]]
    others = [line for i, line in enumerate(lines) if line.startswith("|") and i not in (start, start + 1)]
    return wrong + [line for line in others if not line.startswith("| `")]


def test_a_page_has_one_table_and_all_of_it_is_read() -> None:
    wrong = {stem(page): unread(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: lines for page, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize("page", PAGES, ids=stem)
def test_the_code_of_every_row_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    names = namespace(text, str(page))
    for row in rows(text):
        # Each row has the page's names to itself; blank lines make a traceback show the page's own line.
        exec(compile("\n" * (row.line - 1) + row.code, str(page), "exec"), dict(names))


# The tests below check the checker.

TABLE = """
```python
import math
x = 4
```

| name | in sparsefn | what differs |
| --- | --- | --- |
| `A` | `math.sqrt(x)` | nothing |
| `B.c(n)`, `d` | `y = x; y + 1` | `a` count |
"""


def test_rows_are_read() -> None:
    assert rows(TABLE) == [Row(9, ["A"], "math.sqrt(x)"), Row(10, ["B.c", "d"], "y = x; y + 1")]
    assert namespace(TABLE, "page.md")["x"] == 4


def test_what_is_no_row_is_found() -> None:
    assert (unread(TABLE), unread(TABLE + TABLE)) == ([], ["2 tables"])
    assert unread(f"{HEADER}\n| : |\n| x | `y` | z |") == ["| : |", "| x | `y` | z |"]


def test_a_name_without_a_row_is_found() -> None:
    assert missing("A B.c c E.d E C.c", rows(TABLE)) == ["E", "C.c"]


@pytest.mark.parametrize("line", ["| `a` | b | c |", "| `a` | `b` |", "| `a` | `b` | |", "| `a` | `b` or `c` | d |"])
def test_a_row_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape("line 2: expected | `name` | `code` | what differs |, got")):
        rows("\n" + line)
