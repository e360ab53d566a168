"""Errors that the tests must see: each is one text of a source file, what replaces it, and the test that must fail.

    python -m tests.planted_errors             # plant each in a copy of the project and run its test there
    python -m tests.planted_errors statistics  # only those whose file or test has this in its name

Prints a line for each error, and ends with status 1 where one is not seen or can no longer be planted. It takes about
two seconds for each error and core. The gradient tests break every operator of every backward pass besides
(helpers.operator_mutants); here stands one of each, and what can go wrong in what is measured and reported.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 120  # for one test
WRONG_VALUE = ("AssertionError", "GradientError")  # what a test raises itself; all else is a crash


class Planted(NamedTuple):
    file: str
    old: str  # occurs once in the file
    new: str
    test: str  # FILE::NAME in tests/, without .py


def in_file(file: str, tests: str, *errors: tuple[str, ...]) -> list[Planted]:
    """Errors (old, new, test) of one file; a test without a file's name is in ``tests``."""
    return [Planted(file, old, new, test if "::" in test else f"{tests}::{test}") for old, new, test in errors]


# fmt: off
ERRORS: list[Planted] = [
    # ------------------------------------------------------------------------------------------------------------------
    # Backward passes
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "smallnorb_novel_viewpoint.py", "test_smallnorb_gradients",
        ("dw = (columns @ rows)", "dw = -(columns @ rows)", "test_conv2d"),
        ("window += dcolumns[i, j]", "window -= dcolumns[i, j]", "test_conv2d"),
        ("x.T @ dout, dout.sum(axis=0)", "x.T @ dout, dout.mean(axis=0)", "test_linear"),
        ("dout * (out > 0)", "dout * (out >= 0)", "test_relu"),
        ("dout * out * (1 - out)", "dout * out * (1 + out)", "test_sigmoid"),
        ("drows = d", "drows = -d", "test_votes"),
        ("dcost = -lambda_ * dz", "dcost = lambda_ * dz", "test_m_step"),
        ("derror = 2 * weight[..., None]", "derror = weight[..., None]", "test_m_step"),
        ("dmass -= (dra * weight)", "dmass += (dra * weight)", "test_m_step"),
        ("ddistance = -0.5 * dlog_ap", "ddistance = 0.5 * dlog_ap", "test_e_step"),
        ("dsigma_sq -= 0.5 * np.einsum", "dsigma_sq += 0.5 * np.einsum", "test_e_step"),
        ("dvotes += dvotes_e", "dvotes -= dvotes_e", "test_em_routing"),
        ("dbeta_a += dbeta_a_m", "dbeta_a -= dbeta_a_m", "test_em_routing"),
        ("return loss, p / len(labels)", "return loss, p", "test_softmax_cross_entropy"),
        ("da = 2 * short", "da = short", "test_spread_loss"),
        ("return 2 * POSE_SCORE * dscores", "return POSE_SCORE * dscores", "test_capsules"),
        ("dhidden = relu_backward(dunits, cache.hidden_relu)", "dhidden = dunits", "test_cnn"),
    ),
    *in_file(
        "multimnist_capsnet.py", "test_multimnist_gradients",
        ("            window += dcolumns", "            window -= dcolumns", "test_conv2d"),
        ("np.multiply(dout, ", "np.add(dout, ", "test_max_pool"),
        ("return dout @ w.T, x.T @ dout, dout", "return dout @ w.T, -x.T @ dout, dout", "test_linear"),
        ("return dout * (out > 0)", "return dout * (out < 0)", "test_activation"),
        ("return dout * out * (1 - out)", "return dout * out * (1 + out)", "test_activation"),
        ("(1 - q) / (np.sqrt(q)", "(1 + q) / (np.sqrt(q)", "test_activation"),
        ("return c * (dc - (c", "return c * (dc + (c", "test_softmax"),
        ("du_hat += db[..., None] *", "du_hat -= db[..., None] *", "test_routing"),
        ('dv = dv + np.einsum("bij,bijd->bjd", db', 'dv = dv - np.einsum("bij,bijd->bjd", db', "test_routing"),
        ('if policy == "stop":', 'if policy == "exact":', "test_routing"),
        ("* np.exp(log_p) - positive) / n", "* np.exp(log_p) + positive) / n", "test_loss"),
        ("(2 / n) * (ABSENT_WEIGHT *", "(1 / n) * (ABSENT_WEIGHT *", "test_loss"),
        ("/ n, (2 / n) * error", "/ n, (1 / n) * error", "test_squared_error"),
        ("(scores)[0] - positive) / n", "(scores)[0] + positive) / n", "test_loss"),
        ("(mask * dmasked", "(dmasked", "test_mask"),
        ("else sigmoid_backward(dx, activation)", "else dx", "test_capsnet"),
        ("(dlengths / lengths)[..., None]", "(dlengths * lengths)[..., None]", "test_capsnet"),
        ("relu_backward(dhidden, relu)", "relu_backward(dhidden, relu + 1)", "test_cnn"),
    ),
    *in_file(
        "fast/spectral_conv.py", "test_multimnist_gradients",
        ("* (2 / U)", "* (1 / U)", "test_spectral_convolution_is_im2col"),
        ("dproducts[:, 1, :, 1] = dre, -dre", "dproducts[:, 1, :, 1] = dre, dre", "test_conv2d"),
        ("np.matmul(t.w_columns.T,", "np.matmul(-t.w_columns.T,", "test_conv2d"),
        ("np.matmul(t.x_columns.T,", "np.matmul(-t.x_columns.T,", "test_conv2d"),
        ("join_phases(dtaps,", "join_phases(-dtaps,", "test_conv2d"),
    ),
    *in_file(
        "fast/dynamic_routing.py", "test_multimnist_gradients",
        ("if t < n_iters - 1:", "if t < n_iters - 2:", "test_fast_routing_is_the_plain_one"),
        ("left += [db, c[t - 1]]", "left += [db, c[t]]", "test_fast_routing_is_the_plain_one"),
    ),
    *in_file(
        "what_routing_does.py", "test_multimnist_gradients",
        ("weights / weights.sum(axis=1", "weights / weights.sum(axis=0", "test_fixed_couplings"),
        ("dw.sum(axis=0, keepdims=True)", "dw.mean(axis=0, keepdims=True)", "test_one_transformation_for_all"),
        ("_replace(primary=RELU, digit=IDENTITY)", "_replace(primary=RELU)",
         "test_loss_and_gradients_are_those_of_autograd"),
        ("_replace(primary=RELU, digit=IDENTITY)", "_replace(digit=IDENTITY)",
         "test_loss_and_gradients_are_those_of_autograd"),
        ("(answers != trained).any(axis=1)", "(answers != trained).all(axis=1)",
         "test_what_routing_does::test_the_study_of_the_routing_by_hand"),
    ),
    *in_file(
        "mnist_affine_capsnet.py", "test_mnist_affine",
        ("(dout / 4)", "(dout / 2)", "test_avg_pool_is_the_loop"),
        ("dx = relu_backward(dx, relu) if k < 3 else dx", "dx = relu_backward(dx, relu) if k < 2 else dx",
         "test_whole_networks"),
    ),
    *in_file(
        "conv_matrix_capsules.py", "test_conv_routing",
        (", x[:, :, :, i, j], out=", ", -x[:, :, :, i, j], out=", "test_gradient_of_both_forms"),
        ("combine.reduce(x, axis=2)", "x[:, :, 0]", "test_routing_gradient"),
        ("return dpose, da_in, dw, mass_unit * dbeta_a", "return dpose, da_in, dw, dbeta_a", "test_routing_gradient"),
        ("dw = dw.sum(axis=(0, 1)", "dw = dw.mean(axis=(0, 1)", "test_gradient_of_both_forms"),
        ("sigmoid_backward(da, cache.a_primary)", "da * cache.a_primary", "test_capsnet_gradient"),
    ),
    *in_file(
        "fast/field_em.py", "test_conv_routing",
        (", x[:, :, :, i, j], out=", ", -x[:, :, :, i, j], out=", "test_gradient_of_both_forms"),
        ('np.einsum("klirajrb->klijab"', '-np.einsum("klirajrb->klijab"', "test_gradient"),
        ("by_v *= v", "by_v += v", "test_routing_gradient"),
        ("dkron = rows.swapaxes(3, 4) @ dout", "dkron = -rows.swapaxes(3, 4) @ dout", "test_routing_gradient"),
        ("constant = dmu - 2 * dsigma_sq * mean", "constant = dmu + 2 * dsigma_sq * mean", "test_routing_gradient"),
        ("* (dmass_cost * mass).sum(axis=0)", "* (-dmass_cost * mass).sum(axis=0)", "test_routing_gradient"),
        ("dmu = (first - mean * total)", "dmu = (first + mean * total)", "test_routing_gradient"),
        ("dr = dra * a_in[:, None]", "dr = dra", "test_routing_gradient"),
    ),
    *in_file(
        "conv_matrix_capsules.py", "test_conv_matrix_capsules",
        ("dconv = relu_backward(dx.reshape(relu.shape), relu)", "dconv = dx.reshape(relu.shape)",
         "test_a_whole_networks_gradient_with_the_images"),
        ("weight = len(part.labels) / n", "weight = 1 / n", "test_parts_of_a_batch_add_up_to_its_gradient"),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    # Views
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "smallnorb_novel_viewpoint.py", "test_protocol",
        ("(model, params, data.familiar)", "(model, params, data.train)",
         "test_accuracies_and_drop_of_views"),
        ("(model, params, data.held_out)", "(model, params, data.familiar)",
         "test_accuracies_and_drop_of_views"),
        ("drop=familiar - held_out", "drop=held_out - familiar", "test_accuracies_and_drop_of_views"),
        ("familiar=views(1, *trained", "familiar=views(1, *others",
         "test_accuracies_and_drop_of_views"),
        ("held_out=views(2, *others", "held_out=views(2, *trained",
         "test_accuracies_and_drop_of_views"),
        ("familiar=views(1,", "familiar=views(0,", "test_smallnorb_invariants::test_no_image_of_one_set_is_in_another"),
        ("familiar=read(test, c.train_azimuths", "familiar=read(train, c.train_azimuths",
         "test_smallnorb_files::test_familiar_and_held_out_views_show_other_objects"),
        ("train._replace(objects=train.objects[:-n_val])", "train._replace(objects=train.objects)",
         "test_smallnorb_files::test_settings_are_chosen_on_other_objects"),
        ("images).argmax(axis=1) == split.labels", "images).argmin(axis=1) == split.labels",
         "test_every_image_counts_once_in_an_accuracy"),
        ("in range(0, len(images), EVALUATION_BATCH)", "in range(0, len(images) - 1, EVALUATION_BATCH)",
         "test_every_image_counts_once_in_an_accuracy"),
        ("weight=len(batch)", "weight=config.batch_size", "test_the_loss_of_an_epoch_is_the_mean_over_its_images"),
        ("math.ceil(len(data.train.labels) / config.batch_size)", "len(data.train.labels) // config.batch_size",
         "test_the_loss_of_an_epoch_is_the_mean_over_its_images"),
        ("x.mean(axis=(2, 3)", "x.mean(axis=(0, 2, 3)",
         "test_smallnorb_invariants::test_each_channel_of_each_image_is_standardized"),
        ("x.std(axis=(2, 3)", "x.std(axis=(1, 2, 3)",
         "test_smallnorb_invariants::test_each_channel_of_each_image_is_standardized"),
        ("images = standardized(images) if config", "images = images if config",
         "test_smallnorb_invariants::test_standardized_voxels_are_those_of_the_raw_images"),
        ("confusion[hard, hard].sum() / max(1, confusion[hard].sum())", "np.trace(confusion) / confusion.sum()",
         "test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind"),
        ('HARD_CLASSES = ("L", "tripod")', 'HARD_CLASSES = ("L", "frame")',
         "test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind"),
        ("networks, tested, confusions = make_models(config), data.held_out",
         "networks, tested, confusions = make_models(config), data.familiar",
         "test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind"),
        ('cnn("cnn_matched", round(', 'cnn("cnn_matched", 1 + round(',
         "test_the_cnns_of_views_are_the_nearest_in_size"),
        ('cnn("cnn", 64)', 'cnn("cnn", 65)', "test_the_cnns_of_views_are_the_nearest_in_size"),
        ("rng.integers(0, slack + 1, (2, n, 1))", "rng.integers(0, slack + 1, (2, 1, 1))",
         "test_smallnorb_invariants::test_training_crops_are_drawn_for_each_image_and_test_crops_not_at_all"),
        ("slack + 1, (2", "slack, (2", "test_jitter_is_drawn_for_each_image"),
        ("rng.uniform(0.8, 1.2, (n, 1", "rng.uniform(0.8, 1.2, (1, 1", "test_jitter_is_drawn_for_each_image"),
        ("rng.uniform(-0.2, 0.2, (n, 1", "rng.uniform(-0.2, 0.2, (1, 1", "test_jitter_is_drawn_for_each_image"),
        ("gaussian(math.sqrt(1 / config.n_features)", "gaussian(1.2 * math.sqrt(1 / config.n_features)",
         "test_initial_parameters_of_views"),
        ("gaussian(math.sqrt(2 / config.n_features)", "gaussian(0.8 * math.sqrt(2 / config.n_features)",
         "test_initial_parameters_of_views"),
        ("gaussian(math.sqrt(1 / n_hidden)", "gaussian(1.2 * math.sqrt(1 / n_hidden)",
         "test_initial_parameters_of_views"),
        ("gaussian(0.1, N_PRIMARY", "gaussian(0.12, N_PRIMARY", "test_initial_parameters_of_views"),
        ('),\n        "conv1.b": np.zeros(CONV_CHANNELS, config.dtype),\n        "primary.w"',
         ') * 1.2,\n        "conv1.b": np.zeros(CONV_CHANNELS, config.dtype),\n        "primary.w"',
         "test_initial_parameters_of_views"),
        ('np.zeros(CONV_CHANNELS, config.dtype),\n        "primary.w"',
         'np.full(CONV_CHANNELS, 0.1, config.dtype),\n        "primary.w"', "test_initial_parameters_of_views"),
        ('"class.beta_a": np.zeros(', '"class.beta_a": 1 + np.zeros(',
         "test_initial_parameters_of_views"),
        ("np.full(N_CLASSES, config.beta_v_init", "np.full(N_CLASSES, -config.beta_v_init",
         "test_initial_parameters_of_views"),
        ("VARIANCE_FLOOR = 3.0", "VARIANCE_FLOOR = 2.0", "test_defaults_are_the_stored_ones"),
        ("ACTIVATION_SCORE = 1 / 16, 4.0", "ACTIVATION_SCORE = 1 / 4, 4.0", "test_defaults_are_the_stored_ones"),
        ("= 1 / 16, 4.0", "= 1 / 16, 2.0", "test_defaults_are_the_stored_ones"),
        ("\"held_out_accuracy\", 1 / N_CLASSES)", "1 / N_PRIMARY\n", "test_accuracies_and_drop_of_views"),
        ("0.2 + 0.7 * progress", "0.2 + 0.6 * progress",
         "test_smallnorb_invariants::test_the_margin_grows_from_first_to_last_step"),
        ("spread_margin(progress)", "spread_margin(1 - progress)",
         "test_the_margin_grows_from_the_first_step_of_the_training_to_the_last"),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    # Convolutional matrix capsules, and attacks
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "conv_matrix_capsules.py", "test_protocol",
        ("(model, params, data.test, config", "(model, params, data.train, config",
         "test_matrix_capsules_are_tested_on_test_digits"),
        ("(source.test_images, source.test_labels)", "(source.train_images, source.train_labels)",
         "test_matrix_capsules_are_tested_on_test_digits"),
        ('{"familiar_accuracy": data.test', '{"familiar_accuracy": data.train', "test_accuracies_and_drop_of_views"),
        ("models[name] |= angle_accuracies(config, part, answers)",
         "models[name] |= angle_accuracies(config, part, np.roll(answers, 1))",
         "test_conv_matrix_capsules::test_accuracies_at_an_angle_are_those_of_its_views"),
        ("for part in (data.test, data.held_out):", "for part in (data.held_out, data.test):",
         "test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind"),
        ('"held_out_accuracy": data.held_out', '"held_out_accuracy": data.test', "test_accuracies_and_drop_of_views"),
        ('["familiar_accuracy"] - models[name]["held_out_accuracy"]',
         '["held_out_accuracy"] - models[name]["familiar_accuracy"]', "test_accuracies_and_drop_of_views"),
        ("range(0, len(images), size)))", "range(0, len(images) - 1, size)))",
         "test_every_image_counts_once_in_an_accuracy"),
        ("weight=len(batch.labels)", "weight=config.batch_size",
         "test_the_loss_of_an_epoch_is_the_mean_over_its_images"),
        ("np.linspace(0, n_all - 1, n)", "np.linspace(0, n_all - 2, n)",
         "test_conv_matrix_capsules::test_training_images_depend_on_the_seed_and_test_images_do_not"),
        ("return min(range(1, 1025), key=difference)", "return 1 + min(range(1, 1025), key=difference)",
         "test_the_convolutional_cnn_is_the_nearest_in_size"),
        ("gaussian(math.sqrt(2 / fan_in)", "gaussian(1.2 * math.sqrt(2 / fan_in)",
         "test_initial_parameters_of_convolutional_capsules"),
        ("gaussian(math.sqrt(2 / channels)", "gaussian(0.8 * math.sqrt(2 / channels)",
         "test_initial_parameters_of_convolutional_capsules"),
        ("eye + gaussian(0.1,", "eye + gaussian(0.12,", "test_initial_parameters_of_convolutional_capsules"),
        ("- 0.5 * math.log(config.variance_floor)", "+ 0.5 * math.log(config.variance_floor)",
         "test_initial_parameters_of_convolutional_capsules"),
        ('gain = 1 if name == "out" else 2', 'gain = 1 if name == "out" else 1.4',
         "test_initial_parameters_of_convolutional_capsules"),
        ("chance = 1 / config.n_classes", "chance = 1 / 10", "test_accuracies_and_drop_of_views"),
        ("units = relu if dropout is None else relu * dropout", "units = relu",
         "test_conv_matrix_capsules::test_half_of_the_hidden_units_are_left_out_in_training_and_none_in_a_test"),
        ("dropout = 2 * rng.integers", "dropout = rng.integers",
         "test_conv_matrix_capsules::test_half_of_the_hidden_units_are_left_out_in_training_and_none_in_a_test"),
        ("x, relu = relu_forward(pooled)", "x, relu = pooled, pooled",
         "test_conv_routing::test_gradient"),
        ("config.cnn_epochs, config.cnn_lr,", "config.cnn_epochs, config.lr,",
         "test_conv_matrix_capsules::test_the_learning_rate_rises_then_falls_and_the_cnn_has_its_own"),
    ),
    *in_file(
        "capsule_attacks.py", "test_protocol",
        ("labels, loss, epsilon, n_steps, config.pixel_range",
         "labels, loss, 2 * epsilon, n_steps, config.pixel_range",
         "test_accuracy_under_attack_is_that_of_the_images_out_of_reach"),
        ("np.maximum(images - epsilon,", "np.maximum(images - 2 * epsilon,",
         "test_capsule_attacks::test_an_attack_is_the_loop_over_pixels_and_errors_are_seen"),
        ("np.minimum(images + epsilon,", "np.minimum(images + 2 * epsilon,",
         "test_capsule_attacks::test_an_attack_is_the_loop_over_pixels_and_errors_are_seen"),
        ("epsilon / n_steps * np.sign(", "2 * epsilon / n_steps * np.sign(",
         "test_capsule_attacks::test_an_attack_is_the_loop_over_pixels_and_errors_are_seen"),
        ("x = np.clip(x + step,", "x = np.clip(x - step,",
         "test_accuracy_under_attack_is_that_of_the_images_out_of_reach"),
        ("np.logical_and.accumulate(np.all(", "np.asarray(np.all(",
         "test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon"),
        ("np.all(list(right.values()), axis=0)", "np.all(list(right.values())[:2], axis=0)",
         "test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon"),
        ('{"fgsm": 1, "iterated": config.attack_steps}', '{"fgsm": 1, "iterated": 1}',
         "test_an_image_that_was_misread_once_counts_as_misread_at_every_larger_epsilon"),
        ("subset(data.test, config.n_attack)", "subset(data.held_out or data.test, config.n_attack)",
         "test_accuracy_under_attack_is_that_of_the_images_out_of_reach"),
        ("loss) == 0).all(", "loss, ws) == 0).any(",
         "test_accuracy_under_attack_is_that_of_the_images_out_of_reach"),
        ("model.loss(scores, labels, 1.0)", "model.loss(scores, labels, 0.0)",
         "test_the_margin_that_is_attacked_is_the_last_of_the_training"),
        ("dodds / (a * (1 - a))", "dodds * (a * (1 - a))",
         "test_capsule_attacks::test_the_log_odds_loss_and_that_its_test_sees_errors"),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    # Digits
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "multimnist_capsnet.py", "test_protocol",
        ("test = Overlays(digits.test_images, digits.test_labels",
         "test = Overlays(digits.train_images, digits.train_labels", "test_composites_are_of_test_digits"),
        ("images[-n:], labels[-n:])", "images[:n], labels[:n])",
         "test_settings_are_chosen_on_training_digits_that_are_not_trained_on"),
        (" == L).mean()", " > 0).mean()", "test_composites_are_of_test_digits"),
        (" > 0).mean()", " == L).mean()", "test_composites_are_of_test_digits"),
        (".mean() / L)", ".mean())", "test_composites_are_of_test_digits"),
        ("np.argsort(-scores", "np.argsort(scores", "test_composites_are_of_test_digits"),
        ('["recon_mse"] = error / batch.sources.size', '["recon_mse"] = error / batch.images.size',
         "test_composites_are_of_test_digits"),
        ("state.end_epoch(config.steps_per_epoch,", "state.end_epoch(config.steps_per_epoch + 1,",
         "test_composites_are_of_test_digits"),
        ("errors = zip(*workers.map(work, range(0, len(batch.labels), EVALUATION_BATCH)",
         "errors = zip(*workers.map(work, range(0, len(batch.labels) - EVALUATION_BATCH, EVALUATION_BATCH)",
         "test_composites_are_of_test_digits"),
        ('"train_recon_loss": error / batch.labels.shape[1]', '"train_recon_loss": error',
         "test_the_loss_of_reconstruction_is_that_of_one_digit"),
        ("loss + config.recon_weight * error", "loss + error",
         "test_the_loss_of_reconstruction_is_that_of_one_digit"),
        ("rng.integers(len(self.labels),", "rng.integers(len(self.labels) - 1,",
         "test_every_digit_is_trained_on"),
        ("rng.integers(len(self.labels) -", "rng.integers(len(self.labels) - 1 -",
         "test_every_digit_is_trained_on"),
        ("self.shifts[rng.integers(len(self.shifts), size=n)]", "self.shifts[[rng.integers(len(self.shifts))] * n]",
         "test_every_digit_is_trained_on"),
        (" >= start, ", " > start, ",
         "test_multimnist_capsnet::test_a_composite_is_the_maximum_of_two_shifted_digits_of_different_classes"),
        ("common >= min_iou", "common > 0 * min_iou",
         "test_multimnist_capsnet::test_admissible_shifts_are_all_those_that_overlap_enough"),
        ("max(1, 1 + round(", "max(1, 2 + round(", "test_the_cnns_of_digits_are_the_nearest_in_size"),
        ("math.sqrt(PRIMARY_SIZE / I)", "math.sqrt(1.5 * PRIMARY_SIZE / I)",
         "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(2 / (KERNEL**2 * n_in))", "math.sqrt(3 / (KERNEL**2 * n_in))",
         "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(1 / (KERNEL**2 * C))", "math.sqrt(1.5 / (KERNEL**2 * C))",
         "test_initial_parameters_of_networks_for_digits"),
        ("2 / sizes[1], 1 / sizes[2]", "2 / sizes[1], 1.5 / sizes[2]",
         "test_initial_parameters_of_networks_for_digits"),
        ("variances = (2 / CAPSULE_SIZE", "variances = (1.4 / CAPSULE_SIZE",
         "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(2 / (K * K * C))", "math.sqrt(3 / (K * K * C))", "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(2 / n_flat)", "math.sqrt(3 / n_flat)", "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(1 / net.n_hidden)", "math.sqrt(1.5 / net.n_hidden)",
         "test_initial_parameters_of_networks_for_digits"),
        ('"set_accuracy", 1 / config.n_pairs', '"set_accuracy", 1 / config.n_classes',
         "test_composites_are_of_test_digits"),
        ("WARMUP = 100", "WARMUP = 10", "test_defaults_are_the_stored_ones"),
        ("= 0.9, 0.1, 0.5", "= 0.9, 0.1, 1.0", "test_defaults_are_the_stored_ones"),
        ('"decoder": (256, 512)', '"decoder": (256, 256)',
         "test_multimnist_capsnet::test_presets_and_flags_make_the_config"),
        ("state.add(losses)", "state.add(losses, 2)", "test_composites_are_of_test_digits"),
        ("1 - step / self.n_steps", "1 - step / (2 * self.n_steps)",
         "test_multimnist_capsnet::test_the_learning_rate_rises_then_falls"),
    ),
    *in_file(
        "mnist_affine_capsnet.py", "test_protocol",
        ('["upright_accuracy"], 12)', '["upright_accuracy"], 2)', "test_turned_digits_are_test_digits_that_are_turned"),
        ("digits.test_images[:n_test], digits.test_labels[:n_test]",
         "digits.train_images[:n_test], digits.train_labels[:n_test]",
         "test_turned_digits_are_test_digits_that_are_turned"),
        ("(val, digits.train_labels[held_out])", "(val, digits.train_labels[train][: len(val)])",
         "test_turned_digits_are_test_digits_that_are_turned"),
        ("scores.argmax(axis=1), error / batch", "scores.argmin(axis=1), error / batch",
         "test_turned_digits_are_test_digits_that_are_turned"),
        ("error / batch.sources.size", "error / len(batch.sources)",
         "test_turned_digits_are_test_digits_that_are_turned"),
        ("degrees, config.n_sweep)", "0.0, config.n_sweep)", "test_turned_digits_are_test_digits_that_are_turned"),
        ("confusion_matrix(image_set.labels, answers,", "confusion_matrix(answers, image_set.labels,",
         "test_mnist_affine::test_figures_are_counts_of_right_answers"),
        ("np.linspace(0, len(shift) - 1,", "np.linspace(0, len(shift) // 2,",
         "test_mnist_affine::test_the_sweep_is_spread_over_the_test_digits"),
        ("m + 1, (len(", "m + 1, (1 or len(", "test_jitter_is_drawn_for_each_image"),
        ("integers(-m, m + 1,", "integers(-m, m,",
         "test_mnist_affine::test_augmentation_is_drawn_for_each_image_and_never_at_test"),
        ("order[config.n_val : config.n_val + n_train]", "order[config.n_val - 1 : config.n_val - 1 + n_train]",
         "test_mnist_affine::test_training_validation_and_test_share_no_digit"),
        ("order = permutation(len(data.labels),", "order = permutation(len(data.labels) - 1,",
         "test_every_digit_is_trained_on"),
        ("gain = 2 if k < 2 else 1", "gain = 1 if k < 2 else 1", "test_initial_parameters_of_networks_for_digits"),
        ("math.sqrt(2 / (LENET_KERNEL**2 * C))", "math.sqrt(3 / (LENET_KERNEL**2 * C))",
         "test_initial_parameters_of_networks_for_digits"),
        ("threads, headline, 1 / base.N_CLASSES", "threads, headline, 1 / 45",
         "test_turned_digits_are_test_digits_that_are_turned"),
        ("AFFNIST_SCALE = 20.0, 0.2, (0.8, 1.2)", "AFFNIST_SCALE = 20.0, 0.2, (0.9, 1.2)",
         "test_defaults_are_the_stored_ones"),
        ("range(-90, 91, 5)", "range(-90, 90, 5)", "test_defaults_are_the_stored_ones"),
        ("[cos, -sin]", "[cos, sin]", "test_mnist_affine::test_quarter_turns_are_exact_and_counter_clockwise"),
        (">= config.match_accuracy", "> 0 * config.match_accuracy",
         "test_mnist_affine::test_training_stops_at_the_accuracy_asked_for"),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    # Statistics, tables, results
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "claims.py", "test_claims",
        ("ALPHA / n_comparisons", "ALPHA", "test_the_level_is_shared_among_all_listed_comparisons"),
        ("both[:, 0] - both[:, 1]", "both[:, 1] - both[:, 0]", "test_the_word_is_that_of_the_interval"),
        ("if low > 0 or high < 0:", "if low >= 0 or high <= 0:", "test_the_ends_of_an_interval"),
        ("-tolerance <= low and high <= tolerance", "-tolerance < low and high < tolerance",
         "test_the_ends_of_an_interval"),
        ("-tolerance <= low and high <= tolerance", "high <= tolerance", "test_the_ends_of_an_interval"),
        ('sample["n"] < MIN_SEEDS', 'sample["n"] < 2', "test_the_ends_of_an_interval"),
        ("max(first) - start >= len(first)", "False", "test_only_the_first_of_the_listed_seeds_are_taken"),
        ("set(first) != set(second)", "len(first) < len(second)", "test_only_the_first_of_the_listed_seeds_are_taken"),
        ("if x[-1] == level:", "if False:", "test_a_claim_may_be_read_at_equal_accuracy"),
        ("(level - x[k - 1])", "(x[k] - level)", "test_values_at_equal_accuracy_by_hand"),
        ("level = min(", "level = max(", "test_values_at_equal_accuracy_by_hand"),
    ),
    *in_file(
        "visualize_conv_matrix_capsules.py", "test_visualize_conv_matrix",
        ("labels[:, None])", "labels[:, None] * 0)", "test_the_decoder_sees_one_pose"),
    ),
    *in_file(
        "visualize_multimnist_capsnet.py", "test_visualize_multimnist",
        ("length.n_steps * length.batch_size", "length.n_epochs * length.n_train",
         "test_the_length_of_a_training_is_what_its_setting_says"),
        ("interval(values) for", "(values.mean(), values.std()) for",
         "test_the_length_of_a_training_is_what_its_setting_says"),
        (" * np.maximum(weight, 1e-12)[:, None]", "", "test_couplings_are_means_weighted_by_length"),
    ),
    *in_file(
        "visualize_mnist_affine_capsnet.py", "test_visualize_affine",
        ('accuracy["capsnet"] - rows', 'rows - accuracy["capsnet"]',
         "test_the_sweep_is_mean_and_interval_of_the_reported_seeds"),
    ),
    *in_file(
        "support/statistics.py", "test_statistics",
        ("return max(settings, key", "return min(settings, key",
         "test_a_file_is_read_with_its_means_and_whole_configurations"),
        ("isf(level / 2, n - 1)", "isf(level / 2, n)", "test_three_seeds_by_hand"),
        ("isf(level / 2,", "isf(level,", "test_three_seeds_by_hand"),
        ("ddof=1", "ddof=0", "test_three_seeds_by_hand"),
        ("t_quantile(n, level) * sd", "t_quantile(n) * sd", "test_a_sample_has_the_interval_of_scipy_at_every_level"),
        ("half = t_quantile", "half = 0.5 * t_quantile", "test_three_seeds_by_hand"),
        ("* sd / math.sqrt(n)\n    return", "* sd / math.sqrt(n - 1)\n    return", "test_three_seeds_by_hand"),
        ('"high": mean + half', '"high": mean + half / 2', "test_three_seeds_by_hand"),
        ("mean = len(values), float(np.mean(values))", "mean = len(values), float(np.median(values))",
         "test_three_seeds_by_hand"),
        ("0.05 / n_comparisons", "0.05", "test_the_seeds_needed_are_the_fewest_that_make_the_interval_narrow_enough"),
        ("> half_width", "> 2 * half_width",
         "test_the_seeds_needed_are_the_fewest_that_make_the_interval_narrow_enough"),
        ('"higher" if low > 0 else "lower"', '"lower" if low > 0 else "higher"',
         "test_a_pair_by_hand_whatever_the_order"),
        ("low <= 0 <= high", "low < 0 < high", "test_the_verdict_is_the_intervals_with_five_seeds_or_more"),
        ('difference["n"] < MIN_SEEDS', 'difference["n"] < 2',
         "test_the_verdict_is_the_intervals_with_five_seeds_or_more"),
        ("differences > 0", "differences >= 0", "test_a_tie_is_not_higher"),
        ("np.subtract(values, others)", "np.subtract(others, values)", "test_a_pair_by_hand_whatever_the_order"),
        ("compare_pairs(own, column)", "compare_pairs(column, own)",
         "test_a_pair_by_hand_whatever_the_order"),
        ('if all(name in run["models"] for run', 'if any(name in run["models"] for run',
         "test_what_not_every_run_has_is_left_out"),
    ),
    *in_file(
        "compare_seeds.py", "test_compare_seeds",
        ('if name.startswith("caps")', "if True",
         "test_the_capsules_are_compared_with_the_others_wherever_they_stand"),
        ("parse_constant=refuse", "parse_constant=float", "test_a_run_that_dies_is_named_and_alone_run_again"),
        ("[setting.args, seed, args.threads, np", "[setting.args, seed, np", "test_resume_runs_only_what_is_missing"),
        ("[setting.args, seed, args", "[seed, args", "test_resume_runs_only_what_is_missing"),
        (".encode() + archive", ".encode()", "test_resume_knows_the_code_that_is_imported"),
        ("process.terminate()", "pass", "test_stopped_it_keeps_what_is_finished_and_ends_its_runs"),
        ('if result.get("dataset") != dataset:', "if False:", "test_runs_on_other_data_are_not_mixed"),
    ),
    *in_file(
        "support/result_tables.py", "test_statistics",
        ("{sample['high'] - sample['mean']:", "{sample['high'] - sample['low']:",
         "test_report::test_a_study_has_a_row_for_each_kind_of_assignments"),
        ("{s['higher']} of {s['n']}", "{s['n'] - s['higher']} of {s['n']}", "test_a_pair_by_hand_whatever_the_order"),
        ("100 * condition[name]", "condition[name]",
         "test_claims::test_the_file_is_made_from_the_list_and_changes_are_seen"),
    ),
    *in_file(
        "report.py", "test_statistics",
        ("TOLERANCE = 1e-9", "TOLERANCE = 1", "test_claims::test_the_file_is_made_from_the_list_and_changes_are_seen"),
        ("if number not in known]", "if number in known]",
         "test_report::test_accuracies_in_sentences_are_those_of_the_tables"),
    ),
    *in_file(
        "support/results.py", "test_protocol",
        ('(",", ":"), allow_nan=False)', '(",", ":"))', "test_no_number_that_is_not_finite_is_a_result"),
        ("json.dumps(content, allow_nan=False)", "json.dumps(content)",
         "test_no_number_that_is_not_finite_is_a_result"),
    ),
    *in_file(
        "support/tables.py", "test_protocol",
        ("(labels, answers), 1)", "(answers, labels), 1)",
         "test_hard_accuracy_is_that_of_the_classes_that_look_new_from_behind"),
    ),
    *in_file(
        "support/run.py", "test_protocol",
        ("if not np.isfinite(loss)", "if np.isnan(loss)", "test_no_number_that_is_not_finite_is_a_result"),
        ("and not state.is_finite", "and False", "test_no_number_that_is_not_finite_is_a_result"),
    ),
    # ------------------------------------------------------------------------------------------------------------------
    # Files, streams, processes
    # ------------------------------------------------------------------------------------------------------------------
    # ------------------------------------------------------------------------------------------------------------------
    # Optimizers, threads
    # ------------------------------------------------------------------------------------------------------------------
    *in_file(
        "support/optimizers.py", "test_optimizers",
        ("key: total / weight", "key: total", "test_a_state_adds_up_the_losses_of_an_epoch"),
        ("+ weight * loss", "+ loss", "test_a_state_adds_up_the_losses_of_an_epoch"),
    ),
    *in_file(
        "fast/optimizers.py", "test_optimizers",
        ("beta1: float = 0.9", "beta1: float = 0.8", "test_adamw_by_hand"),
        ("beta2: float = 0.999", "beta2: float = 0.99", "test_adamw_by_hand"),
        ("epsilon: float = 1e-8", "epsilon: float = 1e-3", "test_adamw_by_hand"),
        ("math.sqrt(1 - beta2**step)", "math.sqrt(1 - beta2)", "test_adamw_by_hand"),
        ("/ (1 - beta1**step)", "/ (1 - beta1)", "test_adamw_by_hand"),
        ("p -= d", "p += d", "test_adamw_by_hand"),
        ("keep = 1 - lr * weight_decay if", "keep = 1 - weight_decay if", "test_adamw_by_hand"),
        ("momentum: float = 0.95", "momentum: float = 0.9", "test_muon_by_hand"),
        ("g += momentum * m", "g += m", "test_muon_by_hand"),
        ("MUON_RMS = 0.2", "MUON_RMS = 0.3", "test_muon_by_hand"),
        ("(vectors / np.sqrt(", "(vectors * np.sqrt(", "test_orthogonalized_is_the_polar_factor"),
        ("grads[0] += other", "grads[0] -= other", "test_adamw_by_hand"),
    ),
    *in_file(
        "fast/workers.py", "test_workers",
        ("n * (k + 1) // n_parts)", "n * (k + 1) // n_parts - 1)",
         "test_parts_are_the_whole_batch_and_an_error_is_seen"),
        ("sum(part[key]", "max(part[key]", "test_parts_are_the_whole_batch_and_an_error_is_seen"),
    ),
]
# fmt: on


def stale() -> list[str]:
    """What is wrong with the list: a text that does not occur just once, a test that is not there."""
    faults = []
    for file, old, new, test in ERRORS:
        n = (ROOT / file).read_text().count(old)
        if n != 1:
            faults.append(f"{file}: {old!r} occurs {n} times")
        if old == new:
            faults.append(f"{file}: {old!r} is replaced by itself")
        module, name = test.split("::")
        path = ROOT / "tests" / f"{module}.py"
        if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE):
            faults.append(f"there is no test {test}")
    return faults


def copy_project(folder: Path) -> Path:
    """The sources, tests and small data; no git history, results or pictures."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "viz", "results", "*.gif", "*.png")
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
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"not finished after {SECONDS} s"
    return done.returncode, done.stdout


def main(words: list[str]) -> int:
    chosen = [error for error in ERRORS if not words or any(word in error.file + error.test for word in words)]
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
            write_source(path, source.replace(error.old, error.new))
            status, output = run_tests(project, [error.test])
            write_source(path, source)
            copies.put(project)
            if status not in (0, 1):
                return f"NO ANSWER: {output.strip()[-300:]}"
            crash = re.search(r"^E +(?:[a-z_]+\.)*([A-Z]\w*(?:Error|Exception|Warning)): ", output, re.MULTILINE)
            by = "" if crash is None or crash[1] in WRONG_VALUE else f" by {crash[1]}"
            return f"seen{by}" if status else "NOT SEEN"

        project = copies.get()
        status, output = run_tests(project, sorted({error.test for error in chosen}))
        copies.put(project)
        if status:
            print(f"a test fails without an error:\n{output[-2000:]}")
            return 1
        for error, answer in zip(chosen, executor.map(plant, chosen), strict=True):
            print(f"{answer:<8} {error.file}: {error.old!r} -> {error.new!r} ({error.test})", flush=True)
            not_seen += not answer.startswith("seen")
    print(f"{len(chosen)} errors, {not_seen} not seen, {time.monotonic() - started:.0f} s")
    return 1 if not_seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
