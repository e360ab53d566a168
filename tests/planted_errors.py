"""Errors that the tests must see, each planted in the syntax tree of a source file.

    python -m tests.planted_errors             # plant each in a copy of the project and run its test there
    python -m tests.planted_errors statistics  # only those whose file or test has this in its name

Prints a line for each error, and ends with status 1 where one is not seen or can no longer be planted. It takes about
two seconds for each error and core. The gradient tests break every operator of every backward pass besides
(helpers.operator_mutants); here stands one of each, and what can go wrong in what is measured and reported.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # for one test

# A file and a file of tests; in the lines below them a test, and the errors that it must see: the function or class (or
# "module"), what occurs there once, and what it becomes. _a, _b ... are any expressions, the same one wherever they
# stand: a local name that changes costs nothing.
LIST = """
smallnorb_novel_viewpoint.py test_gradients
  test_autograd | relu_backward: _a > 0 -> _a >= 0 | m_step_backward: 2 * _a -> _a | e_step_backward: -0.5 -> 0.5 |
     em_routing_backward: 'stop' -> 'exact' | cnn_backward: relu_backward(_a, hidden_relu) -> _a |
     class_scores_backward: 2 * POSE_SCORE -> POSE_SCORE | spread_loss: 2 * _a -> _a |
     capsules_loss: progress -> 1 - progress | capsules_loss: 0.7 -> 0.6
  test_differences | conv2d_backward: _a += _b -> _a -= _b | linear_backward: _a.sum -> _a.mean |
     sigmoid_backward: 1 - _a -> 1 + _a
multimnist_capsnet.py test_gradients
  test_autograd | routing_backward: 'stop' -> 'exact' | margin_loss: 2 -> 1 | squared_error: 2 -> 1 |
     decoder_backward: sigmoid_backward(_a, _b) -> _a | cnn_backward: _b if dropout is None else _b * dropout -> _b |
     cnn_backward: pair.backward(relu_backward(_a, _b), _c, _d) -> pair.backward(_a, _c, _d) |
     capsnet_loss_and_grads: _a / _b.labels.shape[1] -> _a |
     capsnet_loss_and_grads: _a + _b.recon_weight * _c -> _a + _c
  test_differences | max_pool_backward: np.multiply -> np.add
fast/spectral_conv.py test_gradients
  test_autograd | transforms: 2 / _a -> 1 / _a | conv2d_backward: (_a, -_a) -> (_a, _a) |
     conv2d_backward: t.w_columns.T -> -t.w_columns.T
fast/dynamic_routing.py test_gradients
  test_autograd | route: 1 -> 2 | route_backward: c[t - 1] -> c[t]
fast/dynamic_routing.py test_networks
  test_a_cache_of_dynamic_routing_serves_two_backward_passes | routing_backward: kept.pop() -> kept[0]
more/what_routing_does.py test_gradients
  test_random_couplings | random_couplings: 1 -> 0
  test_autograd | shared.backward: _a.sum -> _a.mean |
     make_parts: _a(conv=_b, primary=RELU, digit=IDENTITY) -> _a(primary=RELU)
more/mnist_affine_capsnet.py test_gradients
  test_autograd | avg_pool_backward: 4 -> 2 | softmax_cross_entropy: (_a - _b) / _c -> (_a + _b) / _c
more/conv_matrix_capsules.py test_gradients
  test_autograd | scatter: combine(_a, _b, out=_a) -> combine(_a, -_b, out=_a) |
     field_routing_backward: _a.sum -> _a.mean | over_parents: _b.reduce(_a, axis=2) -> _a[:, :, 0] |
     conv_capsnet_backward: sigmoid_backward(_a, _b) -> _a * _b
fast/field_em.py test_gradients
  test_autograd | votes_backward: _a *= _b -> _a += _b | e_step_backward: (_a - _b) * _c -> (_a + _b) * _c |
     m_step_backward: dmu - 2 * dsigma_sq * mean -> dmu + 2 * dsigma_sq * mean
smallnorb_novel_viewpoint.py test_protocol
  test_accuracies_and_drop_of_views | evaluate: _a.familiar -> _a.train | evaluate: _a.held_out -> _a.familiar |
     make_result: _a - _b -> _b - _a | make_voxel_data: views(1, *_a, 2) -> views(1, *others, 2) |
     make_voxel_data: views(2, *_a, 2) -> views(2, *trained, 2)
  test_every_image_counts_once_in_an_accuracy | fraction_right: _a.argmax -> _a.argmin |
     forward_in_batches: len(images) -> len(images) - 1
  test_the_loss_of_an_epoch_is_the_mean_over_its_images | train: len(batch) -> config.batch_size |
     steps_per_epoch: math.ceil(_a / _b) -> _a // _b
  test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind |
     class_accuracies: right[hard] -> right |
     module: ('L', 'tripod') -> ('L', 'frame') | make_result: data.held_out.labels -> data.familiar.labels
  test_cnns_are_the_nearest_in_size | make_models: 1 + round(_a) -> 2 + round(_a)
  test_jitter_is_drawn_for_each_image | crop: _a + 1 -> _a | crop: (2, _a, 1) -> (2, 1, 1) |
     crop: _b(0.8, 1.2, (_a, 1, 1, 1)) -> _b(0.8, 1.2, (1, 1, 1, 1)) |
     crop: _b(-0.2, 0.2, (_a, 1, 1, 1)) -> _b(-0.2, 0.2, (1, 1, 1, 1))
  test_initial_parameters |
     capsules_init: gaussian(rng, dtype, _a, _b, _c) -> gaussian(rng, dtype, 1.2 * _a, _b, _c) |
     cnn_init: math.sqrt(2 / E) -> 0.8 * math.sqrt(2 / E) |
     cnn_init: gaussian(rng, dtype, _a, _b, J) -> gaussian(rng, dtype, 1.2 * _a, _b, J) |
     capsules_init: 0.1 -> 0.12 |
     capsules_init: gaussian(rng, dtype, _a, K, K, _b, _c) -> gaussian(rng, dtype, 1.2 * _a, K, K, _b, _c) |
     capsules_init: np.zeros(CONV_CHANNELS, _a) -> np.full(CONV_CHANNELS, 0.1, _a) |
     capsules_init: np.zeros(J, dtype) -> 1 + np.zeros(J, dtype) |
     capsules_init: config.beta_v_init -> -config.beta_v_init
  test_defaults_are_the_stored_ones | module: 3.0 -> 2.0 | module: 1 / 16 -> 1 / 4 | module: 4.0 -> 2.0
  test_a_training_stops_at_a_number_that_is_not_finite |
     TrainState.require_finite: not math.isfinite(_a) -> math.isnan(_a) | TrainState.end_epoch: np.abs(p).max() -> 0
smallnorb_novel_viewpoint.py test_contract
  test_an_output_that_is_none_of_this_runs_is_left_alone | require_own_outputs: of != experiment -> False |
     require_own_outputs: of = 'something else' -> of = experiment
  test_a_full_disk | Session.after_step: str(error) -> ''
  test_dependent_defaults_and_checks_are_those_of_a_constructor_too | Settings.__post_init__: self.check() -> None
  test_a_resumed_run_has_the_settings_of_its_beginning | require_same: old != new -> False
  test_a_file_is_written_whole_or_not_at_all | write_file: temporary.unlink(missing_ok=True) -> None
  test_the_right_flag_is_named_where_one_is_near | Parser.error: difflib.get_close_matches(_a, _b, 1, 0.7) -> []
  test_a_line_an_epoch_or_a_bar_on_a_terminal | is_terminal: sys.stderr.isatty() -> False
  test_what_both_base_scripts_define_is_the_same_text_unless_it_is_the_experiments_own |
     one_line: limit // 2 - 1 -> limit // 2
  test_main_without_argv_takes_no_flags_and_leaves_all_as_it_was |
     script.status: _a.callback(signal.signal, signal.SIGTERM, _b) -> _b
smallnorb_novel_viewpoint.py test_networks
  test_numbers_of_parameters | make_models: 64 -> 65
smallnorb_novel_viewpoint.py test_smallnorb_invariants
  test_no_image_of_one_set_is_in_another | make_voxel_data: 1 -> 0
  test_each_channel_of_each_image_is_standardized |
     standardized: _a -= _b(axis=(2, 3), keepdims=True) -> _a -= _b(axis=(0, 2, 3), keepdims=True) |
     standardized: x.std(axis=(2, 3), keepdims=True) -> x.std(axis=(1, 2, 3), keepdims=True)
smallnorb_novel_viewpoint.py test_recorded
  test_data_and_results | voxel_split: standardized(_a) -> _a
smallnorb_novel_viewpoint.py test_smallnorb_files
  test_familiar_and_held_out_views_show_other_objects |
     load_smallnorb: Data(train=_a, familiar=_b, held_out=_c) -> Data(train=_a, familiar=_a, held_out=_c)
multimnist_capsnet.py test_protocol
  test_composites_are_of_test_digits |
     make_data: Overlays(digits.test_images, digits.test_labels, _a)
     -> Overlays(digits.train_images, digits.train_labels, _a) |
     make_data: Overlays(digits.train_images, digits.train_labels, _a)
     -> Overlays(digits.test_images, digits.test_labels, _a) | evaluate: (_a == _b).mean -> (_a > 0).mean |
     evaluate: _a > 0 -> _a == L | evaluate: float(_a / _b) -> float(_a) | top_labels: -_a -> _a |
     evaluate: _a.sources -> _a.images |
     assess: len(batch.labels) -> len(batch.labels) - EVALUATION_BATCH |
     TrainState.add: _a += weight -> _a += 2
  test_settings_are_chosen_on_training_digits_that_are_not_trained_on |
     without_test: Digits(digits.name, _a, _b, _c[_d:], _e[_d:]) -> Digits(digits.name, _a, _b, _c[:n], _e[:n])
  test_cnns_are_the_nearest_in_size | make_models: 1 + round(_a) -> 2 + round(_a)
  test_initial_parameters | capsnet_init: PRIMARY_SIZE / _a -> 1.5 * PRIMARY_SIZE / _a |
     capsnet_init: math.sqrt(2 / _a) -> math.sqrt(3 / _a) | capsnet_init: math.sqrt(1 / _a) -> math.sqrt(1.5 / _a) |
     capsnet_init: 1 / sizes[2] -> 1.5 / sizes[2] | capsnet_init: 2 / CAPSULE_SIZE -> 1.4 / CAPSULE_SIZE |
     cnn_init: 2 -> 3 | cnn_init: 1 if _a else _b -> 1.5 if _a else _b
  test_defaults_are_the_stored_ones | module: WARMUP = 100 -> WARMUP = 10 | module: (0.9, 0.1, 0.5) -> (0.9, 0.1, 1.0) |
     module: {'conv_channels': 32, 'primary_types': 8, 'decoder': (256, 512)}
     -> {'conv_channels': 32, 'primary_types': 8, 'decoder': (256, 256)} | module: (20000, 5000) -> (20000, 2000)
multimnist_capsnet.py test_multimnist_capsnet
  test_every_digit_is_trained_on | Overlays.draw: _b(len(self.labels), size=_a) -> _b(len(self.labels) - 1, size=_a) |
     Overlays.draw: len(self.labels) - _a -> len(self.labels) - 1 - _a |
     Overlays.draw: _b(len(self.shifts), size=_a) -> [_b(len(self.shifts))] * _a
  test_a_composite_is_the_maximum_of_two_shifted_digits_of_different_classes | Overlays.draw: _a >= _b -> _a > _b
  test_admissible_shifts_are_all_those_that_overlap_enough | admissible_shifts: _a >= _b * _c -> _a > 0 * _b * _c
multimnist_capsnet.py test_conv_matrix_capsules
  test_half_of_the_hidden_units_are_left_out_in_training_and_none_in_a_test |
     cnn_forward: _b if _a is None else _b * _a -> _b
more/what_routing_does.py test_what_routing_does
  test_the_study_of_the_routing_by_hand | routing_study: _a.any -> _a.all
more/mnist_affine_capsnet.py test_networks
  test_numbers_of_parameters | module: {'hidden1': 120, 'hidden2': 84} -> {'hidden1': 84, 'hidden2': 120}
more/mnist_affine_capsnet.py test_mnist_affine
  test_the_sweep_is_spread_over_the_test_digits | rotated_set: _a - 1 -> _a // 2
  test_augmentation_is_drawn_for_each_image_and_never_at_test | training_batch: _a + 1 -> _a |
     training_batch: (_a, 2) -> (1 or _a, 2) | training_batch: len(data.labels) -> len(data.labels) - 1
  test_training_validation_and_test_share_no_digit | make_data: _a[_b:_b + _c] -> _a[_b - 1:_b - 1 + _c]
  test_quarter_turns_are_exact_and_counter_clockwise | rotation_matrices: [_a, -_b] -> [_a, _b]
  test_training_stops_at_the_accuracy_asked_for | reached: _a >= _b -> _a > 0 * _b |
     make_result: max(epochs, 1e-09) -> max(state.step, 1)
more/mnist_affine_capsnet.py test_recorded
  test_data_and_results | train: _a.cnn_lr / _a.lr -> 1.0
more/mnist_affine_capsnet.py test_protocol
  test_no_two_draws_share_a_stream | make_data: generator(_a, Stream.DATA) -> generator(Stream.DATA, _a)
  test_turned_digits_are_test_digits_that_are_turned | run_tests: 12 -> 2 |
     make_data: Data(_a, _b, _c, _d, _e[:_f], _g[:_f]) -> Data(_a, _b, _c, _d, _b[:_f], _c[:_f]) |
     make_data: digits.train_labels[held_out] -> digits.train_labels[train][:len(val)] |
     accuracy_and_error: _a.size -> len(_a) |
     run_sweep: rotated_set(_a, _b, _c, _d) -> rotated_set(_a, _b, 0.0, _d)
  test_defaults_are_the_stored_ones | module: 0.8 -> 0.9 | module: 91 -> 90
more/conv_matrix_capsules.py test_conv_matrix_capsules
  test_a_broken_term_of_the_gradient_is_seen | loss_and_grads: len(_a.labels) -> 1
  test_accuracies_at_an_angle_are_those_of_its_views |
     make_result: _a == part.labels -> _a == np.roll(part.labels, 1)
  test_training_images_depend_on_the_seed_and_test_images_do_not | subset: 1 -> 2
  test_half_of_the_hidden_units_are_left_out_in_training_and_none_in_a_test | training_batch: 2 * _a -> _a
more/conv_matrix_capsules.py test_smallnorb_files
  test_settings_are_chosen_on_other_objects | norb_halves: objects[:-_a] -> objects
more/conv_matrix_capsules.py test_protocol
  test_matrix_capsules_are_tested_on_test_digits |
     evaluate: accuracy(_a, _b, _c.test, _d, _e) -> accuracy(_a, _b, _c.train, _d, _e)
  test_accuracies_and_drop_of_views |
     evaluate: {'familiar_accuracy': _a.test, 'held_out_accuracy': _b}
     -> {'familiar_accuracy': _a.train, 'held_out_accuracy': _b} |
     evaluate: {'familiar_accuracy': _a, 'held_out_accuracy': _b.held_out}
     -> {'familiar_accuracy': _a, 'held_out_accuracy': _a} | make_result: _a - _b -> _b - _a
  test_every_image_counts_once_in_an_accuracy | predict_scores: range(0, _a, _b) -> range(0, _a - 1, _b)
  test_the_loss_of_an_epoch_is_the_mean_over_its_images | train: len(batch.labels) -> config.batch_size
  test_cnns_are_the_nearest_in_size |
     nearest_channels: min(_a, key=_b) -> 1 + min(_a, key=_b)
  test_initial_parameters |
     conv_capsnet_init: math.sqrt(2 / fan_in) -> 1.2 * math.sqrt(2 / fan_in) |
     conv_capsnet_init: gaussian(_a, _b, _c, 1, 1, _d, _e) -> gaussian(_a, _b, 0.8 * _c, 1, 1, _d, _e) |
     conv_capsnet_init: 0.1 -> 0.12 | conv_capsnet_init: _a - _b -> _a + _b
  test_defaults_are_the_stored_ones | module: CAPS_KERNEL = 3 -> CAPS_KERNEL = 5
more/attacks.py test_protocol
  test_accuracy_under_attack_is_that_of_the_images_out_of_reach | iterated: box(_a, _b, _c) -> box(_a, 2 * _b, _c) |
     iterated: x + size * _a -> x - size * _a
  test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon |
     attack: now["fgsm" + suffix] = clean.copy() -> pass | attack: left & _a -> left.copy()
  test_defaults_are_the_stored_ones | Effort: 200 -> 20
more/capsule_attacks.py test_protocol
  test_accuracy_under_attack_is_that_of_the_images_out_of_reach |
     attacked_images: conv.subset(_a, _b) -> conv.subset(data.held_out or _a, _b) |
     attack_all: config.seed + 1 -> config.seed
  test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon |
     make_result.accuracies: max(1, _a) -> max(4, _a)
  test_the_margin_that_is_attacked_is_the_last_of_the_training | attacked_network: 1.0 -> 0.0
more/attacks.py test_capsule_attacks
  test_losses_and_that_their_test_sees_errors | of_log_odds.odds_loss: _a / _b -> _a * _b
  test_steps_by_hand | iterated: (1 - MOMENTUM) * _a -> _a |
     iterated: size[halved] /= 2 -> size[halved] /= 3 | iterated: 2 * epsilon -> epsilon
  test_steps_are_halved_until_they_reach_what_no_step_of_the_first_size_would | iterated: size[halved] /= 2 -> pass
  test_more_steps_are_at_least_as_strong_as_fewer |
     attack: n_steps, n_before = 2 * n_steps, _a -> n_steps, n_before = 3 * n_steps, _a
  test_a_search_without_gradients_wins_by_no_more_than_a_point | squares: found > _a -> found < _a
  test_the_attacks_towards_each_class_reach_what_the_greatest_wrong_score_leads_away_from |
     attack: network.towards(target) -> network.towards(1)
  test_no_pixel_leaves_its_box | box: np.minimum(_a, _b) -> _a |
     squares: np.where(rng.random((N, 1, W, C)) < 0.5, low, high) -> np.where(rng.random((N, 1, W, C)) < 0.5, low, 1)
more/capsule_attacks.py test_capsule_attacks
  test_the_gradients_that_an_attacker_follows | attacked_network: _a / lengths -> _a
evidence/again.py test_again
  test_a_changed_number_is_the_only_one_that_differs | compare: _a.get(_b) == _c -> _b in _a
  test_a_changed_number_is_the_only_one_that_differs | run_again: map(str, seeds) -> map(str, seeds[:1])
evidence/claims.py test_claims
  test_the_level_is_shared_among_all_listed_comparisons | judged: ALPHA / _a -> ALPHA
  test_the_word_is_that_of_the_interval | judged: _a - _b -> _b - _a
  test_the_ends_of_an_interval | verdict_of: _a > 0 or _b < 0 -> _a >= 0 or _b <= 0 |
     verdict_of: _a <= _b and _c <= _d -> _a < _b and _c < _d | verdict_of: -_a <= _b and _c -> _c |
     verdict_of: MIN_SEEDS -> 2
  test_only_the_first_of_the_listed_seeds_are_taken | paired_values: max(_a) - _b >= len(_a) -> False |
     paired_values: set(_a) != set(_b) -> len(_a) < len(_b)
support/statistics.py test_claims
  test_the_level_is_shared_among_all_listed_comparisons | describe_sample: t_quantile(_a, _b) -> t_quantile(_a)
  test_a_claim_may_be_read_at_equal_accuracy | at_equal_values: _a[-1] == _b -> False
  test_values_at_equal_accuracy_by_hand | at_equal_values: (_a - _b) / _c -> (x[k] - _a) / _c |
     at_equal_values: min -> max
visualize_multimnist_capsnet.py test_visualize_multimnist
  test_the_length_of_a_training_is_what_its_setting_says |
     read_scaling: _a.n_steps * _a.batch_size -> _a.n_epochs * _a.n_train | draw_scaling: max(0.0, _a) -> min(0.0, _a) |
     draw_scaling: n >= 1e6 -> n > 1e6
more/visualize_conv_matrix_capsules.py test_visualize_conv_matrix
  test_differences_on_shapes_are_capsules_minus_cnn |
     draw_shapes_accuracy: _a if value else '0' -> '0' if value else _a
make_smallnorb_novel_viewpoint_gif.py test_support_figures
  test_animations | make_sweep: min(bounds) -> max(bounds)
support/statistics.py test_statistics
  test_three_seeds_by_hand | t_quantile: _a - 1 -> _a | t_quantile: _a / 2 -> _a |
     describe_sample: np.std(_a, ddof=1) -> np.std(_a, ddof=0) | describe_sample: _a * _b -> 0.5 * _a * _b |
     describe_sample: math.sqrt(_a) -> math.sqrt(_a - 1) | describe_sample: _a + _b -> _a + _b / 2 |
     describe_sample: np.mean -> np.median
  test_a_pair_by_hand_whatever_the_order | verdict: 'lower' if _a else 'undecided' -> 'undecided' if _a else 'lower' |
     compare_pairs: np.subtract(_a, _b) -> np.subtract(_b, _a) |
     summarise: compare_pairs(_a, _b) -> compare_pairs(_b, _a) | compare_pairs: _a > 0 -> _a >= 0
  test_the_verdict_is_the_intervals_with_five_seeds_or_more | verdict: _a > 0 -> _a >= 0 |
     verdict: MIN_SEEDS -> 2
  test_what_not_every_run_has_is_left_out |
     summarise: all((name in run['models'] for run in runs)) -> any((name in run['models'] for run in runs))
compare_seeds.py test_compare_seeds
  test_the_capsules_are_compared_with_the_others_wherever_they_stand | make_document: _a.startswith('caps') -> True
  test_grid_and_zip | describe: max -> min
  test_a_run_that_dies_is_named_and_alone_run_again | read_run: parse_json(file) -> json.loads(file.read_bytes()) |
     run_all: len(results) + len(failures) -> len(results)
  test_resume_runs_only_what_is_missing | make_jobs: [_a, _b, _c.threads, np.__version__] -> [_a, _b, np.__version__] |
     make_jobs: [_a.args, _b, _c, np.__version__] -> [_b, _c, np.__version__] |
     make_jobs: [_a, _b, _c, np.__version__] -> [_a, _b, _c]
  test_resume_knows_the_code_that_is_imported | make_jobs: _a + _b -> _a
  test_stopped_it_keeps_what_is_finished_and_ends_its_runs | run_all: _a.terminate() -> pass
  test_runs_on_other_data_are_not_mixed | require_one_dataset: len(_a) > 1 -> False
  test_three_seeds | module: ('train_seconds', 'epoch_seconds') -> ('train_seconds',) |
     make_document: ('seed', 'data_dir') -> ('seed',)
  test_usage_errors | module: (_a, _b, _c, _d, _e, 'resume') -> (_a, _b, _c, _d, _e)
  test_the_result_does_not_depend_on_jobs | make_parser: n_processors() -> 1
evidence/report.py test_report
  test_accuracies_in_sentences_are_those_of_the_tables | loose_accuracies: _a not in _b -> _a in _b
evidence/report.py test_claims
  test_the_file_is_made_from_the_list_and_changes_are_seen | module: 1e-06 -> 1
support/results.py test_protocol
  test_no_number_that_is_not_finite_is_a_result |
     checksum: json.dumps(_a, sort_keys=True, separators=(',', ':'), allow_nan=False)
     -> json.dumps(_a, sort_keys=True, separators=(',', ':')) |
     parse_json: json.dumps(_a, allow_nan=False) -> json.dumps(_a)
support/tables.py test_your_own_images
  test_result_and_table | confusion_matrix: (labels, answers) -> (answers, labels)
smallnorb_novel_viewpoint.py test_optimizers
  test_a_state_adds_up_the_losses_of_an_epoch | TrainState.end_epoch: _a / _b -> _a | TrainState.add: _a * _b -> _b
fast/optimizers.py test_optimizers
  test_fast_steps_by_hand_and_an_error_is_seen | _adam: 0.9 -> 0.8 | _adam: 0.999 -> 0.99 | _adam: 1e-08 -> 0.001 |
     _adam: beta2 ** step -> beta2 | _adam: beta1 ** step -> beta1 | _adam: _a -= _b -> _a += _b |
     muon_step: _a * _b -> _b | _total: _a += _b -> _a -= _b |
     _muon: 0.95 -> 0.9 | _muon: _a += _b * _c -> _a += _c | module: 0.2 -> 0.3
  test_orthogonalized_is_the_polar_factor | orthogonalized: _a / _b -> _a * _b
fast/workers.py test_workers
  test_parts_are_the_whole_batch_and_an_error_is_seen | Workers.gradients.work: _c(_a, _b) -> _c(_a, _b - 1) |
     Workers.gradients: sum -> max
smallnorb_novel_viewpoint.py test_settings
  test_flags_that_do_not_fit_together | Viewpoints.check: (_a, _b, 'n_elev', 'n_per_combo') -> (_a, _b, 'n_elev')
  test_cnns_are_trained_as_the_capsules_unless_they_have_settings_of_their_own | of_model: c.cnn_lr -> c.lr
multimnist_capsnet.py test_multimnist_data
  test_the_second_mirror_where_the_first_has_no_good_file | module: TIMEOUT = 8 -> TIMEOUT = 800
more/conv_matrix_capsules.py test_settings
  test_presets_and_flags_make_the_config | module: 0.0025 -> 0.015
more/what_routing_does.py test_protocol
  test_defaults_are_the_stored_ones | module: 0.98 -> 0.95
data/digit_files.py test_digit_files
  test_what_is_wrong_is_one_line_that_names_the_file | read_csv: len(names) > _a -> len(names) >= _a |
     read_digit_files: (_a, _b, _c, _d, '.rar') -> (_a, _b, _c, _d)
data/labelled_pictures.py test_read_pictures
  test_a_set_that_shows_little_is_a_warning | read_all: _a / 4 -> _a / 2
data/pictures.py test_read_pictures
  test_a_photograph_is_upright_and_may_be_decoded_at_a_fraction_of_its_size |
     open_upright: (2 * side, 2 * side) -> (side // 2, side // 2)
evidence/search.py test_search
  test_a_longer_training_that_gains_on_fresh_seeds_wins | search: n_fresh ** 0.5 -> n_fresh
support/figures.py test_support_figures
  test_given_flags_must_agree_with_the_checkpoint | load_finished: (_a, _b, _c, 'toys') -> (_a, _b, _c)
support/redraw.py test_redraw
  test_pictures_are_drawn_again | redraw: done.returncode != 0 -> done.returncode > 0
support/result_tables.py test_report
  test_tables_of_one_three_and_six_seeds | seeds_table: _a >= MIN_SEEDS -> _a > MIN_SEEDS
support/experiment.py test_support_figures
  test_an_unfinished_checkpoint_is_an_error | unfinished: _a if name.startswith('cnn') else _b -> _b
visualize_smallnorb_novel_viewpoint.py test_visualize_smallnorb
  test_poses_stand_beside_the_image_by_true_class_and_class_capsule |
     draw_class_poses: RIGHT if _a else WRONG -> WRONG if _a else RIGHT
  test_rows_are_named_by_activations_and_columns_by_scores |
     draw_routing_assignments: iterations[t][v] -> iterations[t][k]
more/make_conv_matrix_capsules_gif.py test_visualize_conv_matrix
  test_a_frame_shows_votes_activations_and_accuracies | make_scene.update: now.routing.a[t, 0] -> now.routing.a[-1, 0]
explorer/make_explorer.py test_explorer
  test_rounding_is_off_by_half_a_step_at_most | quantised: 31 -> 15
lesson/check.py test_exercises
  test_what_cannot_be_checked_is_one_line | main: '123456789' -> '0123456789'
"""


class Planted(NamedTuple):
    file: str
    test: str  # FILE::NAME in tests/, without .py
    where: str
    old: str
    new: str


def read_list() -> Iterator[Planted]:
    for line in re.sub(r"\n {5}", " ", LIST.strip()).splitlines():
        if not line.startswith(" "):
            file, tests = line.split()
            continue
        test, *errors = line.strip().split(" | ")
        for error in errors:
            where, _, change = error.partition(": ")
            yield Planted(file, f"{tests}::{test}", where, *change.split(" -> "))


ERRORS = list(read_list())


def parsed(text: str) -> Any:
    """An expression, or else a statement."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return ast.parse(text).body[0]


def any_expression(node: Any) -> bool:
    return isinstance(node, ast.Name) and re.fullmatch("_[a-z]", node.id) is not None


def matches(pattern: Any, node: Any, found: dict[str, ast.expr]) -> bool:
    """``found``: what the any-expressions of the pattern stand for."""
    if any_expression(pattern) and isinstance(node, ast.expr):
        known = found.setdefault(pattern.id, node)
        return known is node or ast.dump(known) == ast.dump(node)
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(matches(p, n, found) for p, n in zip(pattern, node, strict=True))
    if isinstance(pattern, ast.AST) and type(pattern) is type(node):
        fields = [name for name in pattern._fields if name not in ("ctx", "kind")]
        return all(matches(getattr(pattern, name), getattr(node, name), found) for name in fields)
    return not isinstance(pattern, ast.AST) and type(pattern) is type(node) and bool(pattern == node)


class Replace(ast.NodeTransformer):
    """``places``: of an old node, or of an any-expression's name, to what stands there from now on."""

    def __init__(self, places: dict[Any, Any]) -> None:
        self.places = places

    def visit(self, node: ast.AST) -> Any:
        key = node.id if any_expression(node) else node  # type: ignore[attr-defined]
        return copy.deepcopy(self.places[key]) if key in self.places else self.generic_visit(node)


def place_of(error: Planted, tree: ast.Module) -> tuple[ast.AST, dict[str, ast.expr]]:
    """The node that changes, and what the any-expressions are there. Raises ValueError where it is not the only one."""
    scopes: list[Any] = [tree]
    for name in error.where.split(".") if error.where != "module" else ():
        scopes = [node for scope in scopes for node in scope.body if getattr(node, "name", None) == name]
    pattern, places = parsed(error.old), []
    for node in (node for scope in scopes for node in ast.walk(scope) if isinstance(node, type(pattern))):
        found: dict[str, ast.expr] = {}
        if matches(pattern, node, found):
            places.append((node, found))
    if len(places) != 1:
        raise ValueError(f"{error.old!r} occurs {len(places)} times in {error.where} of {error.file}")
    return places[0]


def planted(error: Planted, source: str) -> str:
    """The source with the error, without comments."""
    tree = ast.parse(source)
    node, found = place_of(error, tree)
    changed = Replace({node: Replace(found).visit(parsed(error.new))}).visit(tree)
    return ast.unparse(ast.fix_missing_locations(changed))


def stale() -> list[str]:
    """What is wrong with the list: an error that cannot be planted, a test that is not there."""
    faults, trees = [], {file: ast.parse((ROOT / file).read_text()) for file in {error.file for error in ERRORS}}
    for error in ERRORS:
        try:
            place_of(error, trees[error.file])
        except ValueError as fault:
            faults.append(str(fault))
        module, name = error.test.split("::")
        path = ROOT / "tests" / f"{module}.py"
        if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            faults.append(f"there is no test {error.test}")
    return faults


def copy_project(folder: Path) -> Path:
    """The sources, tests and small data; no git history, results or pictures."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "results", "*.gif", "*.png")
    return Path(shutil.copytree(ROOT, folder, ignore=left_out))


def write_source(path: Path, text: str) -> None:
    """Its bytecode goes: Python knows that it is old by the second and the size of the file alone."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(project: Path, tests: Collection[str]) -> tuple[int, str]:
    """pytest's exit status (1: a test failed, 0: none did), and its output."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    names = [f"tests/{test.replace('::', '.py::')}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *names]
    try:
        done = subprocess.run(
            command, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=SECONDS * len(names), check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"not finished after {SECONDS} s"
    return done.returncode, done.stdout


def main(words: list[str]) -> int:
    chosen = [error for error in ERRORS if not words or any(word in error.file + error.test for word in words)]
    if not chosen:
        print(f"no file or test has {' or '.join(words)} in its name")
        return 2
    if faults := stale():
        print("\n".join(faults))
        return 1
    started, not_seen = time.monotonic(), 0
    n_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(n_workers) as executor:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for k in range(n_workers):
            copies.put(copy_project(Path(folder, str(k))))

        def plant(error: Planted) -> str:
            project = copies.get()
            path = project / error.file
            source = path.read_text()
            write_source(path, planted(error, source))
            status, output = run_tests(project, [error.test])
            write_source(path, source)
            copies.put(project)
            if status not in (0, 1):
                return f"NO ANSWER: {output.strip()[-300:]}"
            return "seen" if status else "NOT SEEN"

        project = copies.get()
        status, output = run_tests(project, sorted({error.test for error in chosen}))
        copies.put(project)
        if status:
            print(f"a test fails without an error:\n{output[-2000:]}")
            return 1
        for error, answer in zip(chosen, executor.map(plant, chosen), strict=True):
            print(f"{answer:<8} {error.file} {error.where}: {error.old} -> {error.new} ({error.test})", flush=True)
            not_seen += not answer.startswith("seen")
    print(f"{len(chosen)} errors, {not_seen} not seen, {time.monotonic() - started:.0f} s")
    return 1 if not_seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
