"""What `make test-all` runs and `make test` does not: one table, which gives the marker `deep`.

What takes over two seconds, above all compiled code; most rows of the large tables of algorithms and models; bugs that
the laws must notice; runs of several processes; limits of torch; programs and pages.
"""

from fnmatch import fnmatchcase

import pytest

# Rows of the table of algorithms, one or more of a kind, with which `make test` runs the laws.
ROWS = (
    "chain",
    "drop_grow current",
    "faded nm",
    "from_masks",
    "gmp",
    "gmp channel",
    "gmp erk",
    "gmp global floor",
    "gmp nm",
    "gmp tied",
    "hard_concrete",
    "iterative",
    "low_rank",
    "one_shot",
    "one_shot fisher",
    "one_shot random",
    "partition",
    "phases to rigl",
    "rewinding iterative",
    "rewrite",
    "rigl",
    "rigl block",
    "rigl nm",
    "sequence",
    "set",
    "sgd ste",
    "snfs",
    "soft_threshold",
    "static",
    "static erk",
    "ste",
    "supermask",
    "with_terms",
)
# file -> test -> the parameters that `make test` runs all the same, as pytest writes them. Without tests: all of them.
DEEP: dict[str, dict[str, tuple[str, ...]]] = {
    "property_tests/test_attach.py": {
        "test_a_script": ROWS,
        "test_the_law_notices_the_bug": (),
    },
    "property_tests/test_compile.py": {
        "test_compiled_updates_are_eager_ones": ("gmp erk",),
        "test_one_compiled_update_serves_models_of_other_shapes": ("gmp erk-True-*",),
    },
    "property_tests/test_coverage.py": {
        "test_a_poor_strategy_is_noticed": ("sparsities",),
        "test_enough_cases_have_each_trait": ("exact",),
    },
    "property_tests/test_devices.py": {
        "test_an_update_of_54_leaves_stays_in_its_budget": (),
        "test_updates_wait_for_nothing": (
            "gmp-a tensor there",
            "rigl-a tensor there",
            "ste-a tensor there",
            "supermask-a tensor there",
            "gmp nm-a tensor there",
            "one_shot-a tensor there",
            "partition-a tensor there",
        ),
    },
    "property_tests/test_donated.py": {
        "test_donated_has_the_bits_of_the_pure_update": (
            "gmp-adamw",
            "rigl-adamw",
            "ste-adamw",
            "supermask-adamw",
            "rigl block-adamw",
            "set-adamw",
        ),
    },
    "property_tests/test_laws.py": {
        "test_another_process_gives_the_same_bits": (),
        "test_laws_hold": ("nothing_moves_off_the_support-*", *(f"*-{row}" for row in ROWS)),
    },
    "property_tests/test_methods.py": {
        "test_laws_hold": (
            "wanda",
            "movement",
            "snip",
            "powerprop",
            "set by sign",
            "ac_dc",
            "srigl",
            "top_kast",
            "sr_ste",
        ),
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
        "test_passive_watches_every_row": (
            "gmp-trained",
            "rigl-trained",
            "ste-trained",
            "supermask-trained",
            "gmp nm-trained",
            "one_shot-trained",
            "partition-trained",
            "set-trained",
        ),
    },
    "property_tests/test_state_machine.py": {
        "test_so_has_compiled_code": (),
        "test_the_machine_alone_notices_the_bug": (),
        "test_without_a_bug_it_notices_nothing_there": (),
    },
    "property_tests/test_transforms.py": {
        "test_a_fresh_run_says_the_same": ("*-vmap", "*-functorch", "*step"),
        "test_batched_updates_compile_whole": (),
        "test_every_row_and_method_has_the_bits_of_one_process_on_two": (),
        "test_every_row_differentiates_and_takes_the_old_names": (
            "gmp-jvp",
            "rigl-jvp",
            "ste-jvp",
            "supermask-jvp",
            "low_rank-jvp",
            "gmp nm-jvp",
        ),
        "test_inductor_gives_the_same_bits": (),
        "test_updates_are_exported": ("gmp regrow keep",),
    },
    "tests/algorithms/test_frame.py": {
        "test_a_compiled_ensemble_equals_the_loop": (),
        "test_a_quiet_update_holds_nothing_of_a_change_and_both_have_the_bits_of_the_eager_one": (),
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
        "test_compiled_updates_are_the_eager_ones": (),
    },
    "tests/attached/test_attach.py": {
        "test_a_compiled_step_is_watched": (),
    },
    "tests/attached/test_optimizer_state.py": {
        "test_sharded_moments_are_those_of_one_process": (),
    },
    "tests/attached/test_who_writes.py": {
        "test_weights_between_the_steps": ("*-AdamW",),
        "test_weights_between_the_two_calls": ("*-AdamW-*",),
        "test_weights_that_follow": (),
    },
    "tests/budgets/test_counts.py": {
        "test_compiled_code_counts_scores_that_are_rounded": (),
    },
    "tests/budgets/test_distributions.py": {
        "TestGlobal::test_bounds_in_compiled_code": (),
    },
    "tests/budgets/test_redistribute.py": {
        "test_all_of_it_is_pure_under_tensor_steps_vmap_and_compile": (),
    },
    "tests/budgets/test_within.py": {
        "test_a_compiled_update_keeps_the_same_units": (),
        "test_counts_of_random_networks_are_those_of_adding_units_one_by_one": (),
    },
    "tests/calibration/test_chain.py": {
        "test_a_model_is_pruned_as_by_runs_of_the_whole": ("*-wanda-square-pruned",),
        "test_deep_models_keep_every_bit": (),
    },
    "tests/calibration/test_folders.py": {
        "test_a_disk_without_room_loses_nothing": (),
    },
    "tests/calibration/test_runs.py": {
        "test_a_disk_without_room_loses_nothing": (),
        "test_a_process_that_is_killed_goes_on_with_the_same_bits": (),
        "test_a_run_that_is_ended_anywhere_goes_on_with_the_same_bits": (),
        "test_so_does_one_that_leaves_layers_out": (),
        "test_so_does_one_with_an_encoder_and_a_decoder": (),
    },
    "tests/calibration/test_stream.py": {
        "test_a_model_of_four_times_the_memory": (),
        "test_the_new_folder_has_the_bits_of_the_whole_model_in_order": ("*-wanda-dtype0",),
    },
    "tests/compose/test_donated.py": {
        "test_a_change_takes_new_masks_and_little_more": (),
        "test_under_transforms_it_is_the_pure_update": (),
    },
    "tests/compose/test_foreign.py": {
        "test_moments_are_found_in_compiled_code": (),
    },
    "tests/compose/test_phases.py": {
        "test_a_phase_without_a_leaf_to_sparsify_compiles": (),
        "test_leaves_that_no_phase_sparsifies_cost_no_second_graph": (),
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
        "test_steps_are_skipped_member_by_member_and_in_compiled_code": (),
        "test_without_guards_on_globals_every_step_has_the_bits_of_the_eager_one": (),
    },
    "tests/curvature/test_second_order.py": {
        "test_a_compiled_score_is_an_eager_one": ("obd",),
        "test_an_algorithm_with_such_a_score_compiles": (),
    },
    "tests/distributed/test_ends.py": {
        "test_two_processes_end": (),
    },
    "tests/engine/checks/test_calls.py": {
        "test_algorithms_are_made_inside_compiled_code": (),
    },
    "tests/engine/checks/test_factories.py": {
        "test_compiled_code_calls_and_makes_them_without_compiling_anew": (),
    },
    "tests/engine/draws/test_threefry.py": {
        "test_inductor_gives_the_same_bits": (),
        "test_traced_draws_have_the_same_bits": (),
    },
    "tests/engine/leaves/test_mask_bytes.py": {
        "test_compiled_masks_are_equal_and_come_from_one_call": (),
        "test_inductor_reads_them_where_they_lie_and_sees_that_the_memory_is_the_masks": (),
    },
    "tests/engine/numbers/test_elementary.py": {
        "test_compiled_code_gives_the_same_bits": (),
        "test_slopes_are_right_backwards_forwards_batched_and_compiled": ("exp",),
    },
    "tests/engine/numbers/test_numbers.py": {
        "test_sixteen_bits_are_rounded_before_they_are_widened": (),
    },
    "tests/engine/processes/test_agreements.py": {
        "test_who_does_not_come_is_told": (),
    },
    "tests/engine/selection/test_bracket.py": {
        "test_memory_beyond_the_mask_is_bounded": (),
    },
    "tests/engine/selection/test_groups.py": {
        "test_compiled_winners": (),
        "test_every_kind_of_score_has_the_winners_of_the_reference": ("*-torch.float32",),
        "test_winners_of_the_default_compiler": (),
    },
    "tests/engine/selection/test_joined.py": {
        "test_contests_have_the_winners_of_each_competition": (),
    },
    "tests/engine/sums/test_folds.py": {
        "test_every_layout_is_folded_as_a_tensor_is": (),
    },
    "tests/engine/sums/test_pooling.py": {
        "test_memory_operator_and_reference_have_the_same_bits": ("(8,*-torch.float32",),
        "test_near_ties_end_alike_in_compiled_and_exported_code": (),
    },
    "tests/engine/surroundings/test_old_paths.py": {
        "test_old_paths_work_first_in_a_fresh_process": (),
    },
    "tests/engine/surroundings/test_transforms.py": {
        "test_compiled_loops_read_what_was_computed_once": (),
    },
    "tests/masks/test_counts.py": {
        "test_set_operations_under_vmap_compile_and_without_mutation": (),
    },
    "tests/masks/test_packing.py": {
        "test_pack_under_vmap_and_compile": (),
    },
    "tests/masks/test_permutation.py": {
        "test_escapes_and_rounds": (),
    },
    "tests/methods/test_on_groups.py": {
        "test_fpgm_compares_the_vectors_of_whole_units": ("global-residual",),
        "test_taylor_as_a_score_with_shares_by_path": ("residual",),
        "test_taylor_squares_the_sum_over_all_members": ("global-residual",),
    },
    "tests/modules/test_originals.py": {
        "test_a_summary_says_what_the_layers_multiply_with": (),
    },
    "tests/modules/test_params.py": {
        "test_value_and_grad_under_compile": (),
    },
    "tests/modules/test_sparse_linear.py": {
        "test_a_fresh_process_hears_nothing_of_torchs_beta": (),
        "test_inference_mode_and_compile": (),
    },
    "tests/optimizers/test_adam.py": {
        "test_the_pass_over_memory_has_the_bits_of_torch": (),
    },
    "tests/optimizers/test_base.py": {
        "test_0d_leaves_of_every_dtype_have_the_bits_of_eager_in_compiled_code": (),
        "test_compile_gives_the_bits_of_eager_in_one_graph": (),
        "test_inductor_gives_the_bits_of_eager_in_every_dtype": (),
    },
    "tests/optimizers/test_by_path.py": {
        "test_a_part_without_leaves_may_have_an_optimizer_and_need_not": ("names0",),
        "test_compile_gives_the_bits_of_eager_in_one_graph": (),
    },
    "tests/optimizers/test_clipping.py": {
        "test_vmap_compile_threads_and_layout_give_the_bits_of_eager": (),
    },
    "tests/optimizers/test_sgd.py": {
        "test_bits_are_those_of_the_parts": ("1-*-keep", "2-adam-keep"),
        "test_under_transforms_it_leaves_the_step_to_the_parts": (),
    },
    "tests/patterns/test_boxes.py": {
        "test_some_boxes_at_a_time_give_the_bits_of_all_at_once": ("*0*",),
    },
    "tests/patterns/test_kinds.py": {
        "test_masks_are_the_same_under_vmap_and_compiled": (),
    },
    "tests/patterns/test_several_sets.py": {
        "test_units_by_numbers_in_algorithms_vmapped_and_compiled": (),
        "test_vmapped_and_compiled_masks_have_the_same_bits": (),
    },
    "tests/patterns/test_tied.py": {
        "test_given_masks_under_vmap_and_compile": (),
        "test_vmapped_and_compiled_masks_have_the_same_bits": (),
    },
    "tests/report/test_plots.py": {
        "test_pyplot_is_not_loaded": (),
    },
    "tests/scores/test_data.py": {
        "test_reap_in_compiled_code_and_under_vmap": (),
    },
    "tests/scores/test_units.py": {
        "test_vmap_compile_and_pickle": (),
    },
    "tests/shrinking/test_arguments.py": {
        "test_arguments": ("*1", "*2", "*3"),
    },
    "tests/shrinking/test_configs.py": {
        "test_a_llama_is_saved_and_loaded": ("counted",),
        "test_heads_are_told_from_their_width": (),
        "test_layers_that_differ_keep_the_config": (),
    },
    "tests/shrinking/test_costs.py": {
        "test_costs_of_random_networks_are_those_of_the_tensors_and_of_the_smaller_program": (),
    },
    "tests/shrinking/test_groups.py": {
        "test_of_one_head_of_keys_and_values_heads_of_queries_go_and_it_stays": (),
    },
    "tests/shrinking/test_indices.py": {
        "test_along_one_dimension": ("*1", "*2", "*3"),
        "test_along_several_dimensions": ("*1",),
        "test_slices_are_read_as_slices_where_what_stays_lies_at_even_distances": (),
        "test_tables_of_indices": (),
        "test_writes_into_slices": (),
    },
    "tests/shrinking/test_interleaved.py": {
        "test_the_gated_delta_net_of_qwen3_next": (),
        "test_gate_and_up_of_a_unit_go_together": (),
    },
    "tests/shrinking/test_layer_sizes.py": {
        "test_no_fast_path_of_encoders_takes_sizes_wrongly": (),
    },
    "tests/shrinking/test_priced.py": {
        "test_costs_by_kept_units_are_those_of_any_cut_or_the_most_of_them": (),
        "test_weights_cost_what_the_report_says": (),
    },
    "tests/shrinking/test_program.py": {
        "test_models_of_transformers": (),
        "test_the_outputs_of_the_masked_model_at_other_sizes": ("True-parts", "True-unet"),
    },
    "tests/shrinking/test_proof.py": {
        "test_casts_to_float32_stay_in_float64": (),
    },
    "tests/shrinking/test_random_masks.py": {
        "test_masks_show_the_bug": (),
        "test_small_equals_masked": (),
        "test_small_equals_masked_for_many_networks": (),
        "test_small_equals_masked_in_the_zoo": ("vgg",),
        "test_something_goes": ("vgg",),
    },
    "tests/shrinking/test_random_networks.py": {
        "test_every_step_is_drawn": (),
        "test_small_equals_masked_for_many_networks": (),
    },
    "tests/shrinking/test_same_class.py": {
        "test_compiles_and_exports": (),
    },
    "tests/shrinking/test_traced.py": {
        "test_models_on_meta_need_no_memory": (),
        "test_writes_into_views_are_made_free_of_them": (),
    },
    "tests/shrinking/test_transformers.py": {
        "test_a_smaller_llama_is_saved_with_a_smaller_config_and_generates": (),
        "test_half_of_the_units_go_and_outputs_stay": ("class-bert",),
    },
    "tests/shrinking/test_zoo.py": {
        "test_small_equals_masked_for_other_units": (),
        "test_the_program_equals_the_masked_model": ("resnext", "densenet", "mobilenet*"),
        "test_what_shrink_makes_equals_the_masked_model": ("gated linear units",),
    },
    "tests/solve/test_blocked.py": {
        "test_members_and_compiled_code_have_the_same_bits": ("fisher",),
    },
    "tests/test_benchmarks.py": {},
    "tests/test_coming_from.py": {
        "test_the_code_of_every_row_runs": (),
    },
    "tests/test_conformance.py": {
        "test_our_own_row_keeps_every_law": (),
    },
    "tests/test_docs.py": {
        "test_blocks_run": ("README.md",),
        "test_every_row_of_the_readme_works_in_its_loop": ("`sf.gmp*200)`", "`sf.one_shot*"),
    },
    "tests/test_ensemble.py": {
        "test_inside_compile": (),
        "test_members_frozen_early_end_as_they_were": (),
    },
    "tests/test_examples.py": {},
    "tests/test_examples_llm.py": {},
    "tests/test_golden_torch_ao.py": {
        "test_a_rule_of_ones_own": (),
    },
    "tests/test_imports.py": {
        "test_a_fresh_process_does_not_load_them": (),
    },
    "tests/test_public.py": {
        "test_compiled_code_may_ask_for_what_is_loaded_later": (),
        "test_listing_and_star_import_hide_nothing_and_need_no_hypothesis": (),
        "test_what_is_loaded_later_is_told_to_type_checkers_and_listed": (),
    },
    "tests/test_random.py": {
        "test_compiled_draws_have_the_same_bits": (),
        "test_the_hash_seed_does_not_matter": (),
    },
    "tests/test_ratchets.py": {
        "test_updates_walk_no_further": (),
    },
    "tests/test_release.py": {
        "test_an_empty_environment_runs_the_readme": (),
        "test_the_wheel_holds_the_package_and_nothing_else": (),
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
    "tests/testing/test___main__.py": {
        "test_it_is_a_module_that_runs": (),
    },
    "tests/testing/test_check.py": {
        "test_a_broken_one_is_told_which_law_it_breaks_on_what_and_what_to_declare": (),
        "test_an_algorithm_of_the_library_obeys_all_laws_that_bind_it": (),
        "test_the_first_failure_raises_and_a_report_has_all_of_them": (),
    },
    "tests/testing/test_laws_states.py": {
        "test_a_function_that_can_be_imported_gives_the_same_bits": (),
        "test_an_error_there_is_shown_here": (),
    },
    "tests/testing/test_laws_transforms.py": {
        "test_a_graph_for_every_step_is_noticed": (),
    },
    "tests/testing/test_parametrize.py": {
        "test_an_expected_failure_is_one_for_its_row_alone": (),
        "test_one_that_passes_all_the_same_is_an_error_unless_it_is_not_strict": (),
    },
    "tests/testing/test_passive.py": {
        "test_compiled_it_has_the_same_bits": (),
    },
    "tests/testing/test_paste.py": {
        "test_an_error_of_the_algorithm_is_raised_by_the_text": (),
        "test_the_text_fails_for_the_broken_one_and_holds_for_the_healthy_one": ("off by one", "ties*", "aliases*"),
    },
    "tests/testing/test_report.py": {},
    "tests/testing/test_strategies.py": {
        "test_gradients_are_like_the_params": (),
    },
    "tests/testing/test_suggest.py": {
        "test_a_wrong_trigger_is_mended_before_idleness_is_given_up": (),
        "test_a_first_algorithm_gets_all_it_needs_in_one_call": (),
        "test_an_exchange_is_read_from_the_call": (),
        "test_the_text_is_code_that_says_why": (),
        "test_the_trigger_is_seen_over_more_steps_than_a_run_has": ("at*",),
    },
    "tests/testing/test_trial.py": {
        "test_an_error_of_the_algorithm_is_told_as_one_and_not_as_a_law": (),
        "test_distinct_failures_have_a_line_each": (),
    },
    "tests/timing/test_schedules.py": {
        "test_one_graph_serves_every_step": (),
        "test_compiled_vmap_gives_the_same_bits": ("aot_eager",),
    },
    "tests/tree/test_leaves.py": {
        "test_compiled_code_goes_through_empty_containers": (),
    },
    "tests/tree/test_originals.py": {
        "test_compiled_and_batched": (),
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
