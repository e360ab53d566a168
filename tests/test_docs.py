"""The pages: the code of docs/how_capsules_work.md against the scripts; all pages as GitHub renders them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conv_matrix_capsules as conv
import multimnist_capsnet as digits
import smallnorb_novel_viewpoint as views
from helpers import ROOT, check_gradient
from support.workers import Workspace

Array = np.ndarray
TEACHING = ROOT / "docs" / "how_capsules_work.md"
same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


# ----------------------------------------------------------------------------------------------------------------------
# docs/how_capsules_work.md: every code block runs, and computes what the scripts compute
# ----------------------------------------------------------------------------------------------------------------------


def code_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", TEACHING.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@functools.cache
def page() -> Any:
    """What the code blocks define, as attributes."""
    names: dict[str, Any] = {}
    for block in code_blocks():
        exec(compile(block, str(TEACHING), "exec"), names)
    return type("Page", (), {name: staticmethod(value) for name, value in names.items() if callable(value)})


def test_every_function_is_compared() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    defined = re.findall(r"^def (\w+)", "\n".join(code_blocks()), re.MULTILINE)
    helpers = {"softmax", "softmax_backward", "sigmoid"}  # of the others
    assert len(defined) == len(set(defined)) == 26
    assert not [name for name in defined if name not in helpers and not re.search(rf"\bp(age\(\))?\.{name}\b", tests)]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def gradient(f: Any, dout: Any, **inputs: Array) -> Any:
    """For ``check_gradient``: the sum of f's outputs, each times its upstream gradient."""

    def contracted(**changed: Array) -> float:
        out = f(**{**inputs, **changed})
        out, douts = (out, dout) if isinstance(dout, tuple) else ((out,), (dout,))
        return float(sum((o * d).sum() for o, d in zip(out, douts, strict=False)))

    return contracted


def test_squash() -> None:
    s, dv = rng().normal(size=(2, 5, 3, 7))
    for axis in (0, 1):
        out = np.empty_like(s)
        cache = digits.squash_forward(s, axis, out)
        plain = np.moveaxis(s, axis, -1)
        same(page().squash(plain), np.moveaxis(out, axis, -1))
        ds = digits.squash_backward(dv, cache)
        same(page().squash_backward(np.moveaxis(dv, axis, -1), plain), np.moveaxis(ds, axis, -1))


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
def test_dynamic_routing(n_iters: int, policy: str) -> None:
    J, P, I, D, B = 4, 3, 6, 5, 2
    u, w, dv = rng().normal(size=(P, I, B)), rng().normal(size=(J, P, I, D)), rng().normal(size=(J, D, B))
    ws, dw, dw_page = Workspace("float64"), np.empty_like(w), np.zeros((I, J, P, D))
    v, cache = digits.routing_forward(u, w, n_iters, ws)
    v, couplings = v.copy(), [c.copy() for c in cache.c]
    du = digits.routing_backward(dv, cache, policy, dw, ws)
    p, w_page = page(), w.transpose(2, 0, 1, 3)
    for b in range(B):
        u_b, dv_b = u[:, :, b].T, dv[:, :, b]
        u_hat = p.votes(u_b, w_page)
        v_page, steps = p.dynamic_routing(u_hat, n_iters)
        same(v_page, v[:, :, b])
        for (c, _, _), expected in zip(steps, couplings, strict=True):
            same(c, expected[:, :, b].T)
        if policy == "exact":
            du_hat = p.dynamic_routing_backward(dv_b, u_hat, steps)
        else:
            (line,) = re.findall(r"`du_hat = (.*?)`", TEACHING.read_text(encoding="utf-8"))
            c, s, _ = steps[-1]
            du_hat = eval(line, {"np": np, "c": c, "s": s, "dv": dv_b, "squash_backward": p.squash_backward})
        du_page, dw_b = p.votes_backward(du_hat, u_b, w_page)
        same(du_page, du[:, :, b].T)
        dw_page += dw_b
    same(dw_page.transpose(1, 2, 0, 3), dw)


def em_inputs(I: int, J: int, D: int = 16) -> tuple[Array, ...]:
    draw = rng()
    return draw.normal(size=(3, I, J, D)), draw.uniform(0.1, 0.9, (3, I)), draw.normal(size=J), draw.normal(size=J)


@pytest.mark.parametrize("lambdas", [[0.7], [0.5, 1.0], [0.3, 0.8, 1.2]])
def test_em_routing_with_dense_parents(lambdas: list[float]) -> None:
    votes, a, beta_a, beta_v = em_inputs(6, 4)
    dmu, da = rng().normal(size=(3, 4, 16)), rng().normal(size=(3, 4))
    mu, activation, cache = views.em_routing_forward(votes, a, beta_a, beta_v, lambdas, 0.6)
    grads = views.em_routing_backward(dmu, da, cache, "exact")
    betas = [np.zeros(4), np.zeros(4)]
    for b in range(3):
        inputs = (votes[b], a[b], beta_a, beta_v, lambdas, 0.6)
        mu_page, a_page, steps = page().em_routing(*inputs)
        same(mu_page, mu[b])
        same(a_page, activation[b])
        dvotes, da_in, *dbetas = page().em_routing_backward(dmu[b], da[b], *inputs, steps)
        same(dvotes, grads[0][b])
        same(da_in, grads[1][b])
        betas = [total + dbeta for total, dbeta in zip(betas, dbetas, strict=True)]
    same(betas[0], grads[2])
    same(betas[1], grads[3])


@pytest.mark.parametrize(("side", "k", "stride"), [(5, 3, 1), (7, 3, 2), (4, 4, 1)])
def test_em_routing_over_receptive_fields(side: int, k: int, stride: int) -> None:
    """The page's parents see all children through a mask; with one field, coordinates are added as in the script."""
    I, J, P, draw, lambdas, floor = 2, 3, 4, rng(), [1.0] * 3, 0.6
    is_class = side == k
    pose, a = draw.normal(size=(1, side, side, I, P, P)), draw.uniform(0.1, 0.9, (1, side, side, I))
    w = draw.normal(size=(1, 1, I, J, P, P) if is_class else (k, k, I, J, P, P)) * 0.5
    beta_a, beta_v = draw.normal(size=(2, J))
    offset = conv.coordinates(28, "float64") if is_class else None
    mu, activation, cache = conv.field_routing_forward(
        pose, a, w, beta_a, beta_v, len(lambdas), floor, k, stride, offset
    )
    dmu, da = draw.normal(size=mu.shape), draw.normal(size=activation.shape)
    grads = conv.field_routing_backward(dmu, da, cache, "exact")

    fields = page().field_mask(side, k, stride)  # (positions, n_fields)
    n_fields = fields.shape[1]
    seen = np.repeat(np.repeat(fields, I, axis=0), J, axis=1)  # (side * side * I, n_fields * J)
    children = pose[0].reshape(-1, P, P)
    big_w = np.zeros((len(children), n_fields * J, P, P))  # the matrix of each child for each parent
    starts = [(y, x) for y in range(0, side - k + 1, stride) for x in range(0, side - k + 1, stride)]
    pairs = [
        ((y + i) * side + x + j, f, (0, 0) if is_class else (i, j))
        for f, (y, x) in enumerate(starts) for i in range(k) for j in range(k)
    ]  # fmt: skip
    for position, f, (i, j) in pairs:
        big_w[position * I : (position + 1) * I, f * J : (f + 1) * J] = w[i, j]
    votes = page().matrix_votes(children, big_w)
    if offset is not None:
        row, column = np.repeat(offset[:, :, 0, 3].ravel(), I), np.repeat(offset[:, :, 1, 3].ravel(), I)
        votes = page().add_coordinates(votes, row, column)
    votes = votes.reshape(*big_w.shape[:2], P * P)
    inputs = (votes, a.reshape(-1), np.tile(beta_a, n_fields), np.tile(beta_v, n_fields), lambdas, floor)
    unit = seen.any(axis=1).sum() / seen.shape[1]
    is_seen = seen.any(axis=1)
    inputs = (votes[is_seen], a.reshape(-1)[is_seen], *inputs[2:])
    mu_page, a_page, steps = page().em_routing(*inputs, unit, seen[is_seen])
    same(mu_page.reshape(mu.shape), mu)
    same(a_page.reshape(activation.shape), activation)
    dvotes, da_in, dbeta_a, dbeta_v = page().em_routing_backward(
        dmu.reshape(-1, P * P), da.reshape(-1), *inputs, steps, unit
    )
    dvotes_all, da_all = np.zeros_like(votes), np.zeros(len(votes))
    dvotes_all[is_seen], da_all[is_seen] = dvotes, da_in
    dvotes_all = page().add_coordinates_backward(dvotes_all.reshape(big_w.shape))
    dpose, dbig_w = page().matrix_votes_backward(dvotes_all, children, big_w)
    same(dpose.reshape(pose.shape), grads[0])
    same(da_all.reshape(a.shape), grads[1])
    dw = np.zeros_like(w)
    for position, f, (i, j) in pairs:
        dw[i, j] += dbig_w[position * I : (position + 1) * I, f * J : (f + 1) * J]
    same(dw, grads[2])
    same(dbeta_a.reshape(n_fields, J).sum(axis=0), grads[3])
    same(dbeta_v.reshape(n_fields, J).sum(axis=0), grads[4])


def test_m_step_and_e_step_alone() -> None:
    """Their gradients by differences: the scripts' steps have other forms."""
    p, draw, (I, J, D) = page(), rng(), (5, 3, 4)
    r, a = draw.dirichlet(np.ones(J), I), draw.uniform(0.1, 0.9, I)
    votes, beta_a, beta_v = draw.normal(size=(I, J, D)), *draw.normal(size=(2, J))
    douts = draw.normal(size=(J, D)), draw.normal(size=(J, D)), draw.normal(size=J)
    m_step = functools.partial(p.m_step, lam=0.7, floor=0.3, unit=1.7)
    inputs = {"r": r, "a": a, "votes": votes, "beta_a": beta_a, "beta_v": beta_v}
    grads = p.m_step_backward(*douts, **inputs, lam=0.7, floor=0.3, unit=1.7)
    check_gradient(gradient(m_step, douts, **inputs), inputs, dict(zip(inputs, grads, strict=True)), draw)

    mu, sigma_sq, z = m_step(**inputs)
    seen = np.ones((I, J), bool)
    seen[1, 2] = seen[3, 0] = False
    inputs = {"mu": mu, "sigma_sq": sigma_sq, "z": z, "votes": votes}
    dr = draw.normal(size=(I, J))
    assigned = p.e_step(**inputs, seen=seen)
    same(assigned.sum(axis=1), 1)
    assert not assigned[~seen].any()
    grads = p.e_step_backward(dr, assigned, **inputs)
    check_gradient(
        gradient(functools.partial(p.e_step, seen=seen), dr, **inputs), inputs, dict(zip(inputs, grads, strict=True)),
        draw,
    )  # fmt: skip


def test_losses() -> None:
    p, draw = page(), rng()
    v, target = draw.normal(size=(10, 16)) * 0.2, np.eye(10)[3] + np.eye(10)[5]
    lengths = np.sqrt((v * v).sum(axis=1) + digits.SQUASH_EPS)
    loss, dlengths = digits.margin_loss(lengths[:, None], target[:, None], 1)
    ours, dv = p.margin_loss(v, target)
    same(ours, loss)
    same(dv, v * (dlengths / lengths[:, None]))

    a, scores = draw.uniform(size=(2, 5))
    for margin in (0.2, 0.9):
        loss, da = views.spread_loss(a[None], np.array([2]), margin)
        ours, da_page = p.spread_loss(a, 2, margin)
        same(ours, loss)
        same(da_page, da[0])
    loss, dscores = views.softmax_cross_entropy(scores[None], np.array([2]))
    ours, dscores_page = p.cross_entropy(scores, 2)
    same(ours, loss)
    same(dscores_page, dscores[0])

    drawn, digit = draw.uniform(size=(2, 36))
    error, ddrawn = digits.squared_error(drawn[:, None].copy(), digit[:, None], 0.005, 1)
    ours, ddrawn_page = p.reconstruction_loss(drawn, digit, 0.005)
    same(ours, 0.005 * error)
    same(ddrawn_page, ddrawn[:, 0])


def test_score() -> None:
    """Of a network; and its gradient by differences."""
    config = views.Config(dtype="float64")
    capsules = views.make_models(config)["capsules"]
    x = rng().uniform(size=(2, views.IMAGE_SIZE, views.IMAGE_SIZE, 1))
    scores, cache = capsules.forward(capsules.init_params(rng()), x)
    for b in range(2):
        same(page().score(cache.mu[b], cache.a[b]), scores[b])
    inputs, dscore = {"mu": cache.mu[0], "a": cache.a[0]}, rng().normal(size=5)
    dmu, da = page().score_backward(dscore, cache.mu[0])
    check_gradient(gradient(page().score, dscore, **inputs), inputs, {"mu": dmu, "a": da}, rng())
