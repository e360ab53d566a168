"""The benchmarks: networks in JAX and PyTorch against ours, medians and ratios, and the figure. No time is checked."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from benchmarks import (
    __main__ as program, conv_matrix_capsules, figure, measure, multimnist as benchmark, scaling, smallnorb as dense,
)
from figure_checks import check_held, drawn
from helpers import Capture, Patch, usage_error
from more import conv_matrix_capsules as conv
from recorded import check
from smallnorb_novel_viewpoint import init_state
from support.experiment import parse_flags
from support.results import parse_json, save_result

B = 4


def test_times_are_medians_and_ratios_to_ours(monkeypatch: Patch, capsys: Capture) -> None:
    """Of a clock that the steps move; each runs twice in a round, and the second counts."""
    now, pace = [0.0], {"ours": itertools.cycle([9, 1, 9, 5, 9, 2]), "theirs": itertools.cycle([9, 4])}
    steps: dict[str, measure.Step] = {
        name: functools.partial(lambda paces: now.append(now[-1] + next(paces)), pace[name]) for name in pace
    }
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[-1])
    assert measure.interleave(steps, 3, warm_up=0) == {"ours": 2, "theirs": 4}
    monkeypatch.setattr(program, "interleave", lambda *_: {program.OURS: 0.002, "theirs": 0.01 / 3})
    monkeypatch.setattr(program, "in_fresh_process", lambda function, build, repetitions: (0.1, 50.2))
    builds: dict[str, Any] = dict.fromkeys((program.OURS, "theirs"), (lambda: lambda: None, {}))
    table = program.compare(builds, 3)
    assert table["rows"] == [[program.OURS, 1.0, 2.0, 50], ["theirs", 1.67, 3.33, 50]]
    assert program.compare(builds | {"broken": (lambda: lambda: 1 / 0, {})}, 3) == table
    assert capsys.readouterr().err == "broken is left out: ZeroDivisionError\n"


def named(build: Any, **arguments: Any) -> Any:
    """A step that is timed, and what it is given."""
    return [f"{build.__module__}.{build.__name__}", arguments]


def test_what_is_timed(monkeypatch: Patch, capsys: Capture) -> None:
    every: Any = lambda builds, n: [n, {name: named(of, **given) for name, (of, given) in builds.items()}]  # noqa: E731
    monkeypatch.setattr(program, "compare", every)
    for there in ("torch", "none"):
        monkeypatch.setattr(program, "version_of", lambda package, there=there: package == there)
        check(there, {"tables": program.measure(100, 2), "says": capsys.readouterr().err})
    monkeypatch.setattr(program, "blas_threads", limit := MagicMock())
    assert program.measure(4, 3, "smallnorb").keys() == {"smallnorb"}
    limit.assert_called_once_with(3)
    problems = {name: module.problem() for name, module in program.MODULES.items()}
    check("problems", {name: [config, batch] for name, (config, _, batch) in problems.items()})
    for module in program.MODULES.values():  # the same batch for all
        own = [made for made in vars(module).values() if getattr(made, "__module__", "") == module.__name__]
        taken = [inspect.signature(made).parameters.get("batch_size") for made in own]
        assert {batch_size.default for batch_size in taken if batch_size} == {32}


def test_a_command_writes_its_tables_and_what_they_depend_on(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    tables = {"t": {"columns": ["step"], "rows": [["a"]]}}
    for module in (program, scaling):
        monkeypatch.setattr(module, "measure", measured := Mock(return_value=tables))
        flags, given = (["--scaling"], (60, 5)) if module is scaling else (["--only=multimnist"], (60, 5, "multimnist"))
        assert program.main([*flags, "--threads=5", f"--out={tmp_path / 'x.json'}"]) == 0
        assert capsys.readouterr().out == "\nt\n| step |\n| ---- |\n| a    |\n"
        measured.assert_called_once_with(*given)
        found = parse_json(tmp_path / "x.json")
        assert (found["tables"], found["command"].split()[3]) == (tables, flags[0])
        assert found["environment"]["threads"] == 5
    for flags, file in (([], "steps.json"), (["--scaling"], "scaling.json")):  # as report.py --check has them
        assert parse_flags(Path(program.__file__), flags).out.name == file
    assert "not together with --only" in usage_error(program, ["--scaling", "--only=smallnorb"], capsys)


def test_a_step_that_takes_200_mib_and_gives_them_back_has_a_peak_above_them() -> None:
    build = functools.partial(functools.partial, np.ones, 25 << 20)
    assert 200 < measure.in_fresh_process(measure.time_and_peak, build=build, repetitions=1)[1] < 2000


def test_bare_products_are_those_of_the_layers(monkeypatch: Patch) -> None:
    """By hand, of 4 images. Dense: two of conv1, three of the dense layer, three of the votes. CapsNet: three of each
    layer, but the images have no gradient."""
    steps = dense.matrix_products_step(B), benchmark.usual_products_step(B, 1)
    monkeypatch.setattr(np, "matmul", products := Mock(wraps=np.matmul))
    for step in steps:
        step()
    n_multiplied = [a.size * b.shape[-1] for (a, b), _ in products.call_args_list]
    assert n_multiplied[:8] == [B * 16**2 * 16 * 25] * 2 + [B * 4096 * 136] * 3 + [8 * B * 4 * 4 * 5 * 4] * 3
    layers = [(28**2 * 81, 32), (10**2 * 81 * 32, 64), (800 * 8, 160), (2 * 160, 256), (2 * 256, 512), (2 * 512, 36**2)]
    assert n_multiplied[8:] == [B * n * m for k, (n, m) in enumerate(layers) for _ in range(3 if k else 2)]
    step = benchmark.usual_products_step(B, 2)  # each of two threads has half of the images
    products.reset_mock()
    step()
    halves = sum(a.size * b.shape[-1] for (a, b), _ in products.call_args_list)
    assert (products.call_count, halves) == (2 * len(n_multiplied[8:]), sum(n_multiplied[8:]))


def test_a_step_updates_the_parameters_and_has_its_threads(monkeypatch: Patch) -> None:
    assert isinstance(benchmark.overlay_step(B)(), multimnist.Batch)
    for module, update in ((multimnist, "update"), (dense, "adamw_step"), (conv_matrix_capsules, "adamw_step")):
        monkeypatch.setattr(module, update, updated := Mock(wraps=getattr(module, update)))
        (benchmark if module is multimnist else module).numpy_step(B, threads=1)()
        assert updated.call_count == 1
    crews = (benchmark, "Workers"), (conv_matrix_capsules, "Workers"), (dense, "set_blas_threads")
    for module, crew in crews:
        monkeypatch.setattr(module, crew, asked := MagicMock())
        for build in filter(None, (module.numpy_step, getattr(module, "usual_products_step", None))):
            asked.reset_mock()
            build(B, threads=3)
            asked.assert_called_once_with(3)


NETWORKS = ("smallnorb", "multimnist", "matrix_capsules")


def ours(network: str) -> tuple[Any, ...]:
    """Configuration, parameters at random, a batch, loss and gradients; in float64."""
    module, rng = program.MODULES[network], np.random.default_rng(0)
    config, _, batch = module.problem(3)
    config = dataclasses.replace(config, dtype="float64")
    data: Any = [x.astype(float) if x.dtype.kind == "f" else x for x in batch]
    scripts: Any = {"smallnorb": smallnorb, "matrix_capsules": conv, "multimnist": multimnist}
    models = scripts[network].make_models(config)
    model = models["capsnet" if network == "multimnist" else "capsules"]
    params = {key: p + 0.1 * rng.standard_normal(p.shape) for key, p in init_state(model, config).params.items()}
    if network == "smallnorb":
        scores, cache = model.forward(params, data[0])
        loss, dscores = model.loss(scores, data[1], 0.0)
        return config, params, data, loss, model.backward(dscores, cache)[0]
    if network == "multimnist":
        losses, grads = model.loss_and_grads(params, data := multimnist.Batch(*data), 3)
    else:
        losses, grads = conv.loss_and_grads(model, 0.0, params, conv.Examples(*data), 3)
    return config, params, data, losses["train_loss"], grads


@pytest.mark.parametrize("network", NETWORKS)
def test_jax_computes_our_losses_and_gradients(network: str) -> None:
    jax = pytest.importorskip("jax")
    from benchmarks import jax_networks

    config, params, data, loss, grads = ours(network)
    was = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        jax_loss = functools.partial(getattr(jax_networks, f"{network}_loss"), config=config)
        theirs, their_grads = jax.jit(jax.value_and_grad(jax_loss))(params, *data)
    finally:
        jax.config.update("jax_enable_x64", was)
    assert theirs == pytest.approx(loss, rel=1e-9)
    for key, grad in grads.items():
        np.testing.assert_allclose(their_grads[key], grad, rtol=1e-6, atol=1e-9 * np.abs(grad).max(), err_msg=key)


@pytest.mark.parametrize("network", NETWORKS)
def test_pytorch_computes_our_losses_and_gradients(network: str, monkeypatch: Patch) -> None:
    """In float64 but for a few constants."""
    torch = pytest.importorskip("torch")
    config, params, data, expected, grads = ours(network)
    module, built = program.MODULES[network], []
    monkeypatch.setattr(module, "problem", lambda _: (config, None, data))
    monkeypatch.setattr(module, "torch_adam_step", lambda *args, **_: built.extend(args))
    module.torch_step(3)
    theirs, loss_of, x, _ = built

    def arranged(key: str, p: np.ndarray) -> np.ndarray:
        """In PyTorch's order of axes: channels before rows and columns, outputs before inputs."""
        if key == "routing.w":
            return p.reshape(config.primary_side**2, -1, *p.shape[1:]).swapaxes(0, 1)
        if key in ("conv1.w", "primary.w"):
            return (p.reshape(16, 16, 16, -1) if p.ndim == 2 else p).transpose(3, 2, 0, 1)
        return p.T if key.startswith("decoder") else p

    parameters = sorted(theirs.double().named_parameters(), key=lambda named: "." not in named[0])
    pairs = list(zip(sorted(params, key="routing.w".__eq__), parameters, strict=True))
    with torch.no_grad():
        for key, (_, q) in pairs:
            q.copy_(torch.tensor(arranged(key, params[key])).reshape(q.shape))
    monkeypatch.setattr(torch.nn.functional, "logsigmoid", e_step := Mock(wraps=torch.nn.functional.logsigmoid))
    loss = loss_of(theirs, x)
    assert e_step.call_count == {"smallnorb": 2, "matrix_capsules": 3 * 2, "multimnist": 0}[network]  # of each layer
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    for key, (name, q) in pairs:
        grad = arranged(key, grads[key]).reshape(q.shape)
        np.testing.assert_allclose(q.grad, grad, rtol=1e-5, atol=1e-6 * np.abs(grad).max(), err_msg=name)


def test_every_step_in_jax_runs_to_its_end(monkeypatch: Patch) -> None:
    pytest.importorskip("jax")
    from benchmarks import jax_networks

    monkeypatch.setattr(jax_networks.jax, "block_until_ready", wait := Mock(wraps=jax_networks.jax.block_until_ready))
    for network in NETWORKS:
        step = jax_networks.jax_step(network, 2)
        step()
        step()
        config, model, _ = program.MODULES[network].problem(2)
        before, after = init_state(model, config).params, wait.call_args.args[0][0]
        moved = {key: float(np.abs(after[key] - p).max()) for key, p in before.items()}
        assert moved == pytest.approx(dict.fromkeys(moved, 2e-6), rel=0.2)  # by the rate in each step
    assert wait.call_count == 6
    assert inspect.signature(jax_networks.jax_step).parameters["batch_size"].default == 32


def test_a_step_in_pytorch_is_what_its_row_says(monkeypatch: Patch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", compiled := Mock(side_effect=lambda network: network))
    monkeypatch.setattr(torch.optim, "Adam", adam := Mock(wraps=torch.optim.Adam))
    network, x, seen = torch.nn.Conv2d(2, 3, 3), torch.rand(4, 2, 5, 5), list[Any]()

    def loss(f: Any, x: Any) -> Any:
        out = f(x)
        seen.append((out.dtype, *(t.is_contiguous(memory_format=torch.channels_last) for t in (x, network.weight))))
        return out.float().square().sum()

    for on in (False, True):
        before, options = network.weight.detach().clone(), dict.fromkeys(("compiled", "fused", "bfloat16"), on)
        step = measure.torch_adam_step(network, loss, x, (network,), threads=1, channels_last=on, **options)
        step()
        step()
        assert float((network.weight.detach() - before).abs().max()) == pytest.approx(2e-6, rel=0.1)
        assert torch.get_num_threads() == 1
    assert seen == [(torch.float32, False, False)] * 2 + [(torch.bfloat16, True, True)] * 2
    assert (compiled.call_count, [call.kwargs["fused"] for call in adam.call_args_list]) == (1, [False, True])


def test_scaling_has_all_sizes(monkeypatch: Patch) -> None:
    monkeypatch.setattr(scaling, "in_fresh_process", timed := Mock(return_value=(0.01 / 3, 90.0)))
    tables = scaling.measure(100, 2)
    assert [row[0] for row in tables["multimnist_batch"]["rows"]] == ["8", "16", "32", "64", "128"]
    assert tables["multimnist_batch"]["rows"][0][1:] == [3.33, 3.33, 90, 90]  # ms and MiB, for one and two threads
    check("scaling", {"tables": tables, "timed": [named(**call.kwargs) for call in timed.call_args_list]})


def test_the_figure_has_a_bar_for_each_form(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(figure, "STEPS", tmp_path / "steps.json")
    rows = [[form, 1.0, 7.6, 54] for form in [*figure.FORMS, "another form"]]
    steps = {
        name: {"columns": ["training step", "time / numpy's", "ms", "MiB"], "rows": rows} for name in figure.NETWORKS
    }
    save_result(tmp_path / "steps.json", {"tables": steps})
    assert figure.main([f"--outdir={tmp_path}"]) == 0
    check_held(drawn(lambda: figure.draw_steps(steps)).axes[1], bars=[[7.6] * len(figure.FORMS)])
    without = steps | {"smallnorb": steps["smallnorb"] | {"rows": rows[:1] + rows[2:]}}  # as where PyTorch fails
    check_held(drawn(lambda: figure.draw_steps(without)).axes[1], bars=[[7.6] * (len(figure.FORMS) - 1)])
