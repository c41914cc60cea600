"""Settings of the whole suite, made before jax is imported for the first time.

Four fake CPU devices for the sharded tests, and as little optimisation of a CPU's code as XLA
allows, because the suite compiles far more than it computes: it takes a third off its cost. What
comes before the machine's code (fusion, donation, copies) is as it is for users; XLA_FLAGS of one's
own are taken as they are. Programs of other processes get the same, with the environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from importlib import metadata
from pathlib import Path

# A flag that jaxlib does not know ends the process, and later versions do not know the last one.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true"
    + (
        " --xla_cpu_use_fusion_emitters=false"
        if metadata.version("jaxlib").startswith("0.10.")
        else ""
    ),
)

import jax
import pytest
from hypothesis import settings
from jax.experimental.compilation_cache import compilation_cache

# Products in full float32 everywhere, so that identity holds on a GPU as well.
jax.config.update("jax_default_matmul_precision", "highest")

# The Hopper kernels' interpreter, which later versions have, computes in callbacks. XLA lets 32
# programs be dispatched to a CPU at once: if as many wait for the interpreter, it waits for them.
if jax.__version_info__ >= (0, 11):
    jax.config.update("jax_cpu_enable_async_dispatch", False)

# Same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


# Files that take longer than ten seconds, the longest first, from `--durations`. They start first,
# so that no process is left alone with one of them at the end.
LONG = (
    "speculative/test_engine_laws.py",
    "server/test_generate_endpoint.py",
    "engine/test_runner.py",
    "sampling/test_accept.py",
    "speculative/test_prefix_cache.py",
    "models/test_families.py",
    "pallas_kernels/test_few_experts_gpu.py",
    "test_cli_processes.py",
    "test_cli.py",
    "server/test_hostile.py",
    "speculative/test_mtp_families.py",
    "speculative/test_logprobs.py",
    "speculative/test_drafter_laws.py",
    "speculative/test_multi_layer.py",
    "server/test_engine_process.py",
    "speculative/test_rounds.py",
    "speculative/test_grammar.py",
    "test_house.py",
    "speculative/test_mutations.py",
    "speculative/test_identity.py",
    "speculative/test_family_identity.py",
    "pallas_kernels/test_sample_gpu.py",
    "pallas_kernels/test_paged_attention.py",
    "speculative/test_shapes.py",
    "speculative/test_node_budget.py",
    "models/test_hf_eagle3_forward.py",
    "pallas_kernels/test_rotate_write_gpu.py",
    "speculative/test_simulated_acceptance.py",
    "pallas_kernels/test_paged_prefill_tpu.py",
    "server/test_control.py",
    "pallas_kernels/test_packed_experts.py",
)


# Cases that run in the second pass: each is dear, and a sibling of the same law stays in the first,
# which is to end within six minutes on two idle cores.
SECOND_PASS = (
    "core/test_noise.py::test_a_value_does_not_depend_on_the_shape_it_is_computed_in[shape4]",
    "engine/test_program_store.py::test_what_cannot_be_read_is_written_again[cut]",
    "engine/test_program_store.py::test_what_cannot_be_read_is_written_again[flipped]",
    "engine/test_release.py::test_a_start_that_failed_keeps_no_programs_though_its_error_is_kept",
    "engine/test_release.py::test_engines_that_were_shut_down_hold_nothing_though_they_are_kept",
    "engine/test_runner.py::test_poison_in_everything_nobody_wrote_changes_no_token",
    "engine/test_runner.py::test_tensor_parallel_gives_the_same_tokens_and_equal_shards[2]",
    "engine/test_step_compile.py::test_a_program_is_started_again_once_if_its_process_was_ended[h"
    "ang]",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[glm4_moe-xla",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen2-reference]",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen2-xla",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen3-reference]",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen3_moe-reference]",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen3_moe-xla",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen3_moe_mixed-reference]",
    "models/test_families.py::test_chunks_over_pages_equal_transformers[qwen3_moe_mixed-xla",
    "models/test_gpt_oss.py::test_a_model_with_packed_experts_has_the_same_logits",
    "models/test_gpt_oss.py::test_two_shards_give_the_logits_of_one",
    "models/test_hf_eagle3_forward.py::test_every_chain_row_equals_speculators[norm_before_fc",
    "models/test_hf_eagle3_forward.py::test_every_chain_row_equals_speculators[plain",
    "models/test_hf_eagle3_forward.py::test_every_layout_drafts_as_the_numpy_reference[last_hidden",
    "models/test_hf_eagle3_forward.py::test_every_layout_drafts_as_the_numpy_reference[sglang_fus"
    "ed",
    "pallas_kernels/test_attend_one_row_gpu.py::test_equals_the_definition[group of 16",
    "pallas_kernels/test_attend_one_row_gpu.py::test_equals_the_definition[no keys",
    "pallas_kernels/test_attend_one_row_gpu.py::test_equals_the_definition[norms]",
    "pallas_kernels/test_block_plan.py::test_the_plan_says_what_the_mask_rule_says[4-4",
    "pallas_kernels/test_block_plan.py::test_the_plan_says_what_the_mask_rule_says[40-40",
    "pallas_kernels/test_bonus_token_tpu.py::test_the_kernel_is_the_reference[3-7",
    "pallas_kernels/test_bonus_token_tpu.py::test_the_kernel_is_the_reference[4-1-1",
    "pallas_kernels/test_bonus_token_tpu.py::test_the_kernel_is_the_reference[6-16",
    "pallas_kernels/test_compaction_gpu.py::test_any_cut_of_layers_and_columns_gives_the_same[1-3",
    "pallas_kernels/test_compaction_gpu.py::test_any_cut_of_layers_and_columns_gives_the_same[3-20",
    "pallas_kernels/test_compaction_tpu.py::test_the_kernel_is_the_reference[1-16",
    "pallas_kernels/test_compaction_tpu.py::test_the_kernel_is_the_reference[3-128",
    "pallas_kernels/test_compaction_tpu.py::test_the_kernel_is_the_reference[6-64",
    "pallas_kernels/test_few_experts_gpu.py::test_bf16_is_within_a_few_roundings[case0]",
    "pallas_kernels/test_few_experts_gpu.py::test_equals_xla_and_reads_no_untouched_expert",
    "pallas_kernels/test_ops.py::test_every_bundle_takes_sinks_a_window_and_yarn_s_rotation[tpu_i"
    "nterpret-F",
    "pallas_kernels/test_ops.py::test_every_bundle_takes_sinks_a_window_and_yarn_s_rotation[tpu_i"
    "nterpret-T",
    "pallas_kernels/test_ops.py::test_every_bundle_takes_sinks_a_window_and_yarn_s_rotation[xla-F",
    "pallas_kernels/test_ops.py::test_every_bundle_takes_sinks_a_window_and_yarn_s_rotation[xla-T",
    "pallas_kernels/test_packed_experts.py::test_packed_experts_are_as_good_as_unpacked_ones",
    "pallas_kernels/test_packed_experts.py::test_what_is_packed_is_unpacked[3-4",
    "pallas_kernels/test_packed_experts.py::test_what_is_packed_is_unpacked[5-5",
    "pallas_kernels/test_paged_attention_tpu.py::test_any_lengths_of_a_chain",
    "pallas_kernels/test_paged_attention_tpu.py::test_equals_the_reference_and_reads_no_poison[de"
    "code, bf",
    "pallas_kernels/test_paged_prefill_tpu.py::test_any_rows_equal_the_reference",
    "pallas_kernels/test_paged_prefill_tpu.py::test_every_feature_equals_the_reference[bf16",
    "pallas_kernels/test_rotate_write_gpu.py::test_equals_rope_interleaving_and_scatter[3-1-20",
    "pallas_kernels/test_rotate_write_gpu.py::test_equals_rope_interleaving_and_scatter[6-2-64",
    "pallas_kernels/test_rotate_write_gpu.py::test_norms_of_q_and_k_are_those_of_a_norm_of_its_ow"
    "n[3-1-20",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[chain-filtered]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[chain-greedy]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[chain-free]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[chain-hot]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[chain-penalized]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[lopsided",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[tree-filtered",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[tree-greedy]",
    "sampling/test_accept.py::test_speculation_emits_what_plain_sampling_emits[tree-hot]",
    "sampling/test_accept.py::test_the_emitted_distribution_is_the_targets[chain-free",
    "sampling/test_accept.py::test_the_emitted_distribution_is_the_targets[chain-hot",
    "sampling/test_accept.py::test_the_emitted_distribution_is_the_targets[chain-penalized",
    "sampling/test_accept.py::test_the_emitted_distribution_is_the_targets[tree-filtered",
    "sampling/test_accept.py::test_the_emitted_distribution_is_the_targets[tree-hot",
    "sampling/test_threshold_passes.py::test_every_way_keeps_what_halving_keeps",
    "server/test_control.py::test_a_profile_goes_where_the_flag_says",
    "server/test_engine_process.py::test_text_goes_on_over_a_kill",
    "speculative/test_block_drafter.py::test_the_text_is_that_of_plain_decoding",
    "speculative/test_distribution.py::test_verified_tokens_are_distributed_as_the_target_says",
    "speculative/test_drafter_laws.py::test_every_guess_is_that_of_float64[eagle1-5-1",
    "speculative/test_drafter_laws.py::test_every_guess_is_that_of_float64[eagle3-5-2]",
    "speculative/test_drafter_laws.py::test_every_guess_is_that_of_float64[standalone-3-2]",
    "speculative/test_drafter_laws.py::test_verifications_leave_what_a_prompt_leaves[standalone",
    "speculative/test_engine_laws.py::test_a_retracted_row_goes_on_as_if_nothing_had_been[eagle1",
    "speculative/test_engine_laws.py::test_a_retracted_row_goes_on_as_if_nothing_had_been[multi",
    "speculative/test_engine_laws.py::test_a_retracted_row_goes_on_as_if_nothing_had_been[ngram",
    "speculative/test_engine_laws.py::test_a_retracted_row_goes_on_as_if_nothing_had_been[recurre"
    "nt",
    "speculative/test_engine_laws.py::test_a_retracted_row_goes_on_as_if_nothing_had_been[stand",
    "speculative/test_engine_laws.py::test_a_step_without_a_live_row_changes_nothing[eagle1",
    "speculative/test_engine_laws.py::test_a_step_without_a_live_row_changes_nothing[multi",
    "speculative/test_engine_laws.py::test_a_step_without_a_live_row_changes_nothing[ngram",
    "speculative/test_engine_laws.py::test_a_step_without_a_live_row_changes_nothing[recurrent",
    "speculative/test_engine_laws.py::test_a_step_without_a_live_row_changes_nothing[standalone",
    "speculative/test_engine_laws.py::test_one_that_is_always_right_emits_exactly_s_plus_1[eagle1",
    "speculative/test_engine_laws.py::test_one_that_is_always_right_emits_exactly_s_plus_1[multi",
    "speculative/test_engine_laws.py::test_one_that_is_always_right_emits_exactly_s_plus_1[ngram",
    "speculative/test_engine_laws.py::test_one_that_is_always_right_emits_exactly_s_plus_1[recurr"
    "ent",
    "speculative/test_engine_laws.py::test_one_that_is_always_right_emits_exactly_s_plus_1[standa"
    "lone",
    "speculative/test_engine_laws.py::test_the_text_depends_on_no_draft[eagle1",
    "speculative/test_engine_laws.py::test_the_text_depends_on_no_draft[multi_layer",
    "speculative/test_engine_laws.py::test_the_text_depends_on_no_draft[ngram",
    "speculative/test_engine_laws.py::test_the_text_depends_on_no_draft[recurrent",
    "speculative/test_engine_laws.py::test_the_text_depends_on_no_draft[standalone",
    "speculative/test_engine_laws.py::test_weights_of_nothing_but_nan_change_no_text[eagle1",
    "speculative/test_engine_laws.py::test_weights_of_nothing_but_nan_change_no_text[multi_layer",
    "speculative/test_engine_laws.py::test_weights_of_nothing_but_nan_change_no_text[ngram",
    "speculative/test_engine_laws.py::test_weights_of_nothing_but_nan_change_no_text[recurrent",
    "speculative/test_engine_laws.py::test_weights_of_nothing_but_nan_change_no_text[standalone",
    "speculative/test_family_identity.py::test_a_chain_equals_plain",
    "speculative/test_family_identity.py::test_a_chain_over_layers_of_unequal_heads",
    "speculative/test_grammar.py::test_speculative_equals_plain_beside_rows_without_a_grammar[1-t"
    "ree]",
    "speculative/test_grammar.py::test_speculative_equals_plain_beside_rows_without_a_grammar[2-t"
    "ree]",
    "speculative/test_hidden.py::test_programs_without_the_feature_hold_nothing_of_it",
    "speculative/test_hidden.py::test_they_equal_a_dense_forward[tree",
    "speculative/test_hidden.py::test_those_of_a_prompt_are_whole_although_it_is_cached",
    "speculative/test_identity.py::test_speculative_equals_plain[1-1-2",
    "speculative/test_identity.py::test_speculative_equals_plain[1-3-4",
    "speculative/test_identity.py::test_speculative_equals_plain[2-2-4",
    "speculative/test_identity.py::test_speculative_equals_plain[3-1-4",
    "speculative/test_identity.py::test_speculative_equals_plain[3-4-16_p1",
    "speculative/test_identity.py::test_speculative_equals_plain[4-3-20",
    "speculative/test_identity.py::test_speculative_equals_plain[5-1-6",
    "speculative/test_mtp_families.py::test_a_target_brings_its_draft[glm4_moe",
    "speculative/test_mtp_families.py::test_a_target_brings_its_draft[mimo]",
    "speculative/test_multi_layer.py::test_every_guess_is_that_of_a_dense_forward[hidden_first-1]",
    "speculative/test_multi_layer.py::test_every_guess_is_that_of_a_dense_forward[not_chained-2]",
    "speculative/test_multi_layer.py::test_layers_of_nothing_but_nan_change_no_text",
    "speculative/test_multi_layer.py::test_speculative_equals_plain[not_chained-(3, 2, 7)]",
    "speculative/test_multi_layer.py::test_the_pool_law_holds_after_any_history[hidden_first",
    "speculative/test_multi_layer.py::test_the_pool_law_holds_under_a_scheduler",
    "speculative/test_mutations.py::test_a_moved_index_is_noticed[bonus index]",
    "speculative/test_mutations.py::test_a_moved_index_is_noticed[compaction source]",
    "speculative/test_mutations.py::test_a_moved_index_is_noticed[noise position]",
    "speculative/test_ngram.py::test_a_resumed_row_still_knows_what_it_said",
    "speculative/test_ngram.py::test_lookup_changes_no_token",
    "speculative/test_non_finite.py::test_a_prompt_that_overflows_changes_no_text_but_its_own",
    "speculative/test_prefix_cache.py::test_a_row_resumes_over_its_cached_output[multi_layer]",
    "speculative/test_prefix_cache.py::test_a_row_resumes_over_its_cached_output[ngram]",
    "speculative/test_prefix_cache.py::test_acceptance_warm_equals_cold_and_so_do_the_pages[multi"
    "_layer]",
    "speculative/test_prefix_cache.py::test_acceptance_warm_equals_cold_and_so_do_the_pages[ngram]",
    "speculative/test_prefix_cache.py::test_rows_do_not_depend_on_the_chunks_of_a_prompt[multi_la"
    "yer]",
    "speculative/test_prefix_cache.py::test_rows_do_not_depend_on_the_chunks_of_a_prompt[ngram",
    "speculative/test_prefix_cache.py::test_text_is_the_same_in_a_pool_that_is_short[chain]",
    "speculative/test_prefix_cache.py::test_text_is_the_same_in_a_pool_that_is_short[multi_layer]",
    "speculative/test_prefix_cache.py::test_text_is_the_same_in_a_pool_that_is_short[ngram]",
    "speculative/test_prefix_cache.py::test_text_is_the_same_in_a_pool_that_is_short[plain]",
    "speculative/test_prefix_cache.py::test_text_with_cache_is_text_without[32-1-multi_layer]",
    "speculative/test_prefix_cache.py::test_text_with_cache_is_text_without[32-1-ngram]",
    "speculative/test_rounds.py::test_a_step_of_several_rounds_copies_no_pool_and_is_donated",
    "speculative/test_rounds.py::test_a_stop_id_in_any_round_ends_the_text_there[sampling1]",
    "speculative/test_rounds.py::test_a_tree_in_rounds_with_filters_and_penalties",
    "speculative/test_simulated_acceptance.py::test_every_verification_of_an_engine",
    "speculative/test_simulated_acceptance.py::test_whole_numbers_are_exact_in_every_row[shape0",
    "speculative/test_simulated_acceptance.py::test_whole_numbers_are_exact_in_every_row[shape2]",
    "speculative/test_simulated_acceptance.py::test_whole_numbers_are_exact_in_every_row[shape3]",
    "speculative/test_windows.py::test_a_draft_with_windows_reads_its_own_pages",
    "speculative/test_windows.py::test_the_text_is_that_of_a_dense_forward[plain-windows1",
    "speculative/test_windows.py::test_the_text_is_that_of_a_dense_forward[plain-windows2",
    "speculative/test_windows.py::test_the_text_is_that_of_a_dense_forward[tree",
    "test_benchmarks.py::test_every_part_goes_round_in_a_loop[tree]",
    "test_benchmarks.py::test_one_mode_end_to_end",
    "test_cli_processes.py::test_ctrl_c_ends_a_start_at_any_moment[words1",
    "test_cli_processes.py::test_generate_reads_a_pipe_and_ctrl_c_ends_it_cleanly",
    "test_cli_processes.py::test_run_server_says_each_stage_answers_and_stops",
    "text/test_grammars.py::test_every_node_is_told_what_may_follow_its_own_path[xgrammar]",
    "training/test_acceptance.py::test_the_simulator_equals_free_drafting",
    "training/test_dense.py::test_the_teacher_equals_transformers[gpt_oss]",
    "training/test_dense.py::test_the_teacher_equals_transformers[mistral]",
    "training/test_dense.py::test_the_teacher_equals_transformers[qwen3_moe]",
    "training/test_draft_heads.py::test_an_exported_chain_of_layers_drafts_what_it_learnt",
    "training/test_draft_heads.py::test_an_exported_eagle1_head_drafts_what_it_learnt",
    "training/test_draft_heads.py::test_an_exported_eagle3_head_drafts_what_it_learnt",
    "training/test_draft_heads.py::test_exported_layers_for_multi_token_prediction",
    "training/test_draft_job.py::test_a_chain_is_exported_with_the_target_s_embedding[True]",
    "training/test_draft_job.py::test_an_interrupted_run_goes_on_to_the_same_weights",
    "training/test_draft_job.py::test_stored_features_teach_what_the_targets_own_forward_does",
    "training/test_draft_job.py::test_two_devices_learn_what_one_does",
    "training/test_draft_loss.py::test_a_row_of_the_unroll_is_incremental_drafting",
    "training/test_draft_loss.py::test_one_batch_can_be_learnt_to_the_last_depth",
    "training/test_draft_loss.py::test_the_last_feature_reaches_no_earlier_row",
    "training/test_draft_loss.py::test_the_loss_weighs_depths_and_masks_what_cannot_be_drafted",
    "training/test_loop.py::test_a_resumed_run_repeats_the_unbroken_one_bit_for_bit[4]",
)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first; else the order is that of the files."""
    here = Path(__file__).parent
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(SECOND_PASS):
            item.add_marker(pytest.mark.slow)
    rank = {here / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))


@pytest.fixture(scope="session")
def programs_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines of one kind keep compiled programs for each other, in whatever process of the
    run they are."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "programs_of_all"
    folder.mkdir(exist_ok=True)
    return folder


# A process of the suite keeps every program that it compiled, some gigabytes of them.
# Letting them go takes a moment, and all of them are compiled again: not for less than half a GiB.
MOST_RESIDENT, LEAST_GROWTH = 3 * 2**30, 2**29  # bytes
RESIDENT_AFTER = pytest.StashKey[int]()


def resident() -> int:
    """Bytes of this process in memory; 0 where Linux's /proc is not there."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between two files, lets go of what is kept for programs that nobody holds any more, and of
    the folder in which an engine had jax keep every small program of this process."""
    if nextitem is None or nextitem.path == item.path:
        return
    if jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
    after = item.config.stash.get(RESIDENT_AFTER, 0)
    if resident() > max(MOST_RESIDENT, after + LEAST_GROWTH):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        item.config.stash[RESIDENT_AFTER] = resident()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs the Hopper kernels where this jax is too old for them."""
    from jspec.pallas_kernels.hopper import has_mosaic_gpu  # not before the shapes are checked

    if item.get_closest_marker("mosaic_gpu") and not has_mosaic_gpu():
        pytest.skip(f"Mosaic GPU kernels need jax 0.11, this is {jax.__version__}")
