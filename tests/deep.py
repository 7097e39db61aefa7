"""What `make test-all` runs and `make test` does not: one table, which gives the marker `deep`.

Updates that are compiled, of which `make test` has one of a kind; bugs that the laws must notice; runs of several
processes; the same for other steps, optimizers and threads; limits of torch; programs and pages.
"""

from fnmatch import fnmatchcase

import pytest

# file -> test -> the parameters that `make test` runs all the same, as pytest writes them. Without tests: all of them.
DEEP: dict[str, dict[str, tuple[str, ...]]] = {
    "property_tests/test_attach.py": {
        "test_the_law_notices_the_bug": (),
    },
    "property_tests/test_compile.py": {
        "test_compiled_updates_are_eager_ones": ("gmp erk",),
        "test_one_compiled_update_serves_models_of_other_shapes": ("gmp erk-True-*",),
    },
    "property_tests/test_devices.py": {
        "test_updates_wait_for_nothing": ("*-a tensor there",),
    },
    "property_tests/test_donated.py": {
        "test_donated_has_the_bits_of_the_pure_update": ("*-adamw",),
    },
    "property_tests/test_laws.py": {
        "test_another_process_gives_the_same_bits": (),
    },
    "property_tests/test_million.py": {
        "test_a_network_of_other_outputs_is_seen": (),
        "test_a_tree_is_drawn_and_compiled": (),
    },
    "property_tests/test_mutants.py": {
        "test_the_law_notices_the_bug": (),
        "test_the_law_of_a_primitive_notices_the_bug": (),
    },
    "property_tests/test_mutants_shrinking.py": {},
    "property_tests/test_operators.py": {
        "test_operators_are_sound": ("pool", "winners"),
    },
    "property_tests/test_passive.py": {
        "test_passive_watches_every_row": ("*-trained",),
    },
    "property_tests/test_state_machine.py": {
        "test_so_has_compiled_code": (),
        "test_the_machine_alone_notices_the_bug": (),
        "test_without_a_bug_it_notices_nothing_there": (),
    },
    "property_tests/test_transforms.py": {
        "test_a_fresh_run_says_the_same": ("*-grad", "*-vmap", "*-functorch", "*step"),
        "test_batched_updates_compile_whole": (),
        "test_every_row_and_method_has_the_bits_of_one_process_on_two": (),
        "test_every_row_differentiates_and_takes_the_old_names": ("*-jvp",),
        "test_inductor_gives_the_same_bits": (),
        "test_updates_are_exported": ("gmp regrow keep",),
    },
    "tests/algorithms/test_frame.py": {
        "test_a_compiled_ensemble_equals_the_loop": (),
        "test_a_quiet_update_holds_nothing_of_a_change_and_both_have_the_bits_of_the_eager_one": ("ste",),
        "test_a_quiet_update_serves_ints_that_grow": (),
        "test_compiled_updates_equal_eager_ones_and_are_compiled_once": ("rigl-tensor",),
        "test_inductor_code_gives_the_same_masks": (),
        "test_threads_and_hash_seeds_do_not_matter": (),
    },
    "tests/algorithms/test_prune.py": {
        "test_counts_compile": (),
    },
    "tests/algorithms/test_reparametrised.py": {
        "test_all_leaves_may_have_latents_in_compiled_code": (),
    },
    "tests/algorithms/test_supermask.py": {
        "test_compiled_updates_are_the_eager_ones": ("ste-*",),
    },
    "tests/calibration/test_chain.py": {
        "test_deep_models_keep_every_bit": ("wanda-square-gpt2-*",),
    },
    "tests/calibration/test_runs.py": {
        "test_a_run_that_is_ended_anywhere_goes_on_with_the_same_bits": (),
        "test_a_disk_without_room_loses_nothing": (),
        "test_a_process_that_is_killed_goes_on_with_the_same_bits": (),
        "test_so_does_one_that_leaves_layers_out": (),
        "test_so_does_one_with_an_encoder_and_a_decoder": (),
    },
    "tests/calibration/test_stream.py": {
        "test_a_model_of_four_times_the_memory": (),
    },
    "tests/compose/test_donated.py": {
        "test_a_change_takes_new_masks_and_little_more": ("gmp",),
        "test_under_transforms_it_is_the_pure_update": (),
    },
    "tests/compose/test_foreign.py": {
        "test_moments_are_found_in_compiled_code": ("True",),
    },
    "tests/compose/test_rewinding.py": {
        "test_tensor_steps_vmap_and_compiled_code_have_the_same_bits": (),
    },
    "tests/compose/test_sequence.py": {
        "TestInsideAChain::test_srigl_with_ablation_under_vmap_and_compile": (),
    },
    "tests/compose/test_states.py": {
        "test_parts_without_leaves_and_empty_trees_compile": (),
    },
    "tests/compose/test_with_optimizer.py": {
        "test_compiled_scores_see_moments_off_the_masks_and_grown_weights_start_anew": (),
        "test_compiled_steps_have_the_bits_of_eager_ones": (),
        "test_gradients_through_a_compiled_step_are_finite": (),
        "test_without_guards_on_globals_every_step_has_the_bits_of_the_eager_one": (),
    },
    "tests/curvature/test_second_order.py": {
        "test_a_compiled_score_is_an_eager_one": ("obd",),
    },
    "tests/distributed/test_ends.py": {
        "test_two_processes_end": (),
    },
    "tests/engine/selection/test_groups.py": {
        "test_compiled_winners": ("True-shape2",),
    },
    "tests/engine/sums/test_pooling.py": {
        "test_memory_operator_and_reference_have_the_same_bits": ("*-torch.float32",),
        "test_near_ties_end_alike_in_compiled_and_exported_code": (),
    },
    "tests/engine/draws/test_threefry.py": {
        "test_traced_draws_have_the_same_bits": ("uniform",),
    },
    "tests/modules/test_params.py": {
        "test_value_and_grad_under_compile": ("mlp",),
    },
    "tests/modules/test_sparse_linear.py": {
        "test_a_fresh_process_hears_nothing_of_torchs_beta": (),
    },
    "tests/optimizers/test_base.py": {
        "test_0d_leaves_of_every_dtype_have_the_bits_of_eager_in_compiled_code": ("nesterov",),
        "test_compile_gives_the_bits_of_eager_in_one_graph": ("adam",),
        "test_inductor_gives_the_bits_of_eager_in_every_dtype": (),
    },
    "tests/optimizers/test_by_path.py": {
        "test_a_part_without_leaves_may_have_an_optimizer_and_need_not": ("names0",),
        "test_compile_gives_the_bits_of_eager_in_one_graph": (),
    },
    "tests/optimizers/test_sgd.py": {
        "test_bits_are_those_of_the_parts": ("1-*-keep", "2-adam-keep"),
        "test_under_transforms_it_leaves_the_step_to_the_parts": (),
    },
    "tests/patterns/test_several_sets.py": {
        "test_vmapped_and_compiled_masks_have_the_same_bits": ("rigl",),
    },
    "tests/shrinking/test_groups.py": {
        "test_of_one_head_of_keys_and_values_heads_of_queries_go_and_it_stays": (),
    },
    "tests/shrinking/test_program.py": {
        "test_models_of_transformers": ("llama",),
        "test_the_outputs_of_the_masked_model_at_other_sizes": ("True-*",),
    },
    "tests/shrinking/test_random_masks.py": {
        "test_small_equals_masked_for_many_networks": (),
        "test_small_equals_masked_in_the_zoo": ("vgg", "shufflenet v2", "lstm classifier", "llama"),
    },
    "tests/shrinking/test_random_networks.py": {
        "test_small_equals_masked_for_many_networks": (),
    },
    "tests/shrinking/test_zoo.py": {
        "test_small_equals_masked_for_other_units": (),
    },
    "tests/solve/test_blocked.py": {
        "test_members_and_compiled_code_have_the_same_bits": ("exact", "fisher", "obs", "refit"),
    },
    "tests/test_benchmarks.py": {},
    "tests/test_coming_from.py": {
        "test_the_code_of_every_row_runs": (),
    },
    "tests/budgets/test_counts.py": {
        "test_compiled_code_counts_scores_that_are_rounded": (),
    },
    "tests/test_docs.py": {
        "test_blocks_run": ("README.md",),
    },
    "tests/test_ensemble.py": {
        "test_members_frozen_early_end_as_they_were": (),
    },
    "tests/test_examples.py": {},
    "tests/test_examples_llm.py": {},
    "tests/test_public.py": {
        "test_compiled_code_may_ask_for_what_is_loaded_later": (),
    },
    "tests/test_random.py": {
        "test_compiled_draws_have_the_same_bits": ("eager",),
    },
    "tests/test_results.py": {
        "test_a_tiny_run_of_everything_is_killed_and_goes_on": (),
        "test_bad_options_are_told": (),
        "test_the_text_of_a_seed_is_not_in_what_it_trains_on": (),
    },
    "tests/test_resume.py": {
        "test_every_split_point_resumes_in_a_new_process": (),
    },
    "tests/test_site.py": {},
    "tests/test_typing.py": {
        "test_mypy_accepts_right_code_and_finds_every_mistake_of_wrong_code": (),
    },
    "tests/test_upstream.py": {},
    "tests/testing/test_laws_transforms.py": {
        "test_a_graph_for_every_step_is_noticed": (),
    },
    "tests/testing/test_check.py": {
        "test_a_broken_one_is_told_which_law_it_breaks_on_what_and_what_to_declare": (),
        "test_the_first_failure_raises_and_a_report_has_all_of_them": (),
    },
    "tests/testing/test_parametrize.py": {
        "test_one_that_passes_all_the_same_is_an_error_unless_it_is_not_strict": (),
    },
    "tests/testing/test_passive.py": {
        "test_compiled_it_has_the_same_bits": (),
    },
    "tests/testing/test_paste.py": {
        "test_the_text_fails_for_the_broken_one_and_holds_for_the_healthy_one": ("off by one", "ties*", "aliases*"),
    },
    "tests/testing/test_report.py": {},
    "tests/testing/test_suggest.py": {
        "test_a_first_algorithm_gets_all_it_needs_in_one_call": (),
        "test_an_exchange_is_read_from_the_call": (),
        "test_the_trigger_is_seen_over_more_steps_than_a_run_has": ("at*",),
    },
}
# These start processes: deep, but for one.
STARTS, ONE = {"on_ranks"}, "tests/distributed/test_messages.py::test_messages_on_two_ranks"


def is_deep(item: str) -> bool:
    """Whether a test is one of them, by its id."""
    file, _, name = item.partition("::")
    test, _, parameters = name.partition("[")
    tests = DEEP.get(file, {"": ()})
    stay = any(fnmatchcase(parameters, f"{pattern}]") for pattern in tests.get(test, ()))
    return not tests or (test in tests and not stay)


def starts_processes(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    return code is not None and not STARTS.isdisjoint(code.co_names)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_deep(item.nodeid) or (starts_processes(item) and item.nodeid != ONE):
            item.add_marker("deep")
