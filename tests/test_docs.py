"""docs/capsule_reference.md: its code, run in page order, against the scripts, forward and backward, and in PyTorch."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multimnist_capsnet as multimnist
import smallnorb_novel_viewpoint as smallnorb
from fast import dynamic_routing
from helpers import ROOT, Array, check_gradient
from lesson.make_notebook import cells, run_page
from more import conv_matrix_capsules as conv

REFERENCE = ROOT / "docs" / "capsule_reference.md"
same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)


def as_attributes(names: dict[str, Any]) -> Any:
    return type("Page", (), {name: staticmethod(value) for name, value in names.items() if callable(value)})


@functools.cache
def page() -> Any:
    """What the numpy of the page defines, as attributes."""
    return as_attributes(run_page(REFERENCE))


@functools.cache
def page_with_torch() -> Any:
    """All blocks in page order, as one program."""
    names: dict[str, Any] = {}
    exec("\n".join(cell.source for cell in cells(REFERENCE) if cell.is_code), names)
    return as_attributes(names)


def defined() -> list[str]:
    return re.findall(r"^def (\w+)", "\n".join(c.source for c in cells(REFERENCE) if c.is_code), re.MULTILINE)


def test_every_function_is_compared_and_no_name_is_given_twice() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    helpers = {"softmax", "softmax_backward", "sigmoid", "m_step", "e_step"}  # of the others
    in_numpy = {name for name in defined() if not name.endswith("_torch")}
    assert (len(defined()), len(set(defined())), len(in_numpy)) == (39, 39, 26)
    assert not [name for name in in_numpy - helpers if not re.search(rf"\bp(age\(\))?\.{name}\b", tests)]
    assert not [name for name in set(defined()) - in_numpy if f'in_both("{name.removesuffix("_torch")}"' not in tests]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_squash() -> None:
    s, dv = rng().normal(size=(2, 5, 3, 7))
    out, cache = multimnist.squash_forward(s)
    same(page().squash(s), out)
    same(page().squash_backward(dv, s), multimnist.squash_backward(dv, cache))


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", ["exact", "stop"])
@pytest.mark.parametrize("form", [multimnist, dynamic_routing])
def test_dynamic_routing(form: Any, n_iters: int, policy: str) -> None:
    J, P, I, D, B = 4, 3, 6, 5, 5  # images of more than one group of the fast form
    u, w, dv = rng().normal(size=(B, I, P)), rng().normal(size=(I, P, J, D)), rng().normal(size=(B, J, D))
    v, cache = form.routing_forward(u, w, n_iters, multimnist.SQUASH)
    du, dw = form.routing_backward(dv, cache, policy)
    p, w_page, dw_page = page(), w.swapaxes(1, 2), np.zeros((I, J, P, D))
    for b in range(B):
        u_hat = p.votes(u[b], w_page)
        v_page, steps = p.dynamic_routing(u_hat, n_iters)
        same(v_page, v[b])
        for (c, _, _), expected in zip(steps, cache.c, strict=True):
            same(c, expected[b])
        if policy == "exact":
            du_hat = p.dynamic_routing_backward(dv[b], u_hat, steps)
        else:
            (line,) = re.findall(r"`du_hat = (.*?)`", REFERENCE.read_text(encoding="utf-8"))
            c, s, _ = steps[-1]
            du_hat = eval(line, {"np": np, "c": c, "s": s, "dv": dv[b], "squash_backward": p.squash_backward})
        du_page, dw_b = p.votes_backward(du_hat, u[b], w_page)
        same(du_page, du[b])
        dw_page += dw_b
    same(dw_page.swapaxes(1, 2), dw)


@pytest.mark.parametrize("lambdas", [[0.7], [0.5, 1.0], [0.3, 0.8, 1.2]])
def test_em_routing_with_dense_parents(lambdas: list[float]) -> None:
    draw, (B, I, J, D) = rng(), (3, 6, 4, 16)
    votes, a, betas = draw.normal(size=(B, I, J, D)), draw.uniform(0.1, 0.9, (B, I)), draw.normal(size=(2, J))
    dmu, da = draw.normal(size=(B, J, D)), draw.normal(size=(B, J))
    mu, activation, cache = smallnorb.em_routing_forward(votes, a, betas[0], betas[1], lambdas, 0.6)
    grads, dbetas = smallnorb.em_routing_backward(dmu, da, cache, "exact"), np.zeros((2, J))
    for b in range(B):
        inputs = (votes[b], a[b], *betas, lambdas, 0.6)
        mu_page, a_page, steps = page().em_routing(*inputs)
        same(mu_page, mu[b])
        same(a_page, activation[b])
        same(steps[-1][0], cache.m_steps[-1].r[b])
        dvotes, da_in, *dbetas_b = page().em_routing_backward(dmu[b], da[b], *inputs, steps)
        same(dvotes, grads[0][b])
        same(da_in, grads[1][b])
        dbetas += dbetas_b
    same(dbetas, grads[2:])


@pytest.mark.parametrize(("side", "k", "stride"), [(5, 3, 1), (7, 3, 2), (4, 4, 1)])
def test_em_routing_over_receptive_fields(side: int, k: int, stride: int) -> None:
    """The page's parents see all children through a mask; with one field, coordinates are added as in the script."""
    I, J, P, draw, lambdas, floor = 2, 3, 4, rng(), [0.4, 0.7, 1.0], 0.6
    is_class = side == k
    pose, a = draw.normal(size=(1, side, side, I, P, P)), draw.uniform(0.1, 0.9, (1, side, side, I))
    w = draw.normal(size=(1, 1, I, J, P, P) if is_class else (k, k, I, J, P, P)) * 0.5
    beta_a, beta_v = draw.normal(size=(2, J))
    offset = conv.coordinates(28, "float64") if is_class else None
    mu, activation, cache = conv.field_routing_forward(pose, a, w, beta_a, beta_v, lambdas, floor, k, stride, offset)
    dmu, da = draw.normal(size=mu.shape), draw.normal(size=activation.shape)
    grads = conv.field_routing_backward(dmu, da, cache, "exact")

    p = page()
    fields = p.field_mask(side, k, stride)  # (positions, n_fields)
    n_fields = fields.shape[1]
    seen = np.repeat(np.repeat(fields, I, axis=0), J, axis=1)  # (side * side * I, n_fields * J)
    children = pose[0].reshape(-1, P, P)
    big_w = np.zeros((len(children), n_fields * J, P, P))  # the matrix of each child for each parent
    starts = [(y, x) for y in range(0, side - k + 1, stride) for x in range(0, side - k + 1, stride)]
    blocks = []  # of all children at a position and all parents of a field: where their matrices are, in w too
    for (f, (y, x)), i, j in itertools.product(enumerate(starts), range(k), range(k)):
        position = (y + i) * side + x + j
        both = slice(position * I, (position + 1) * I), slice(f * J, (f + 1) * J)
        blocks.append((both, (0, 0) if is_class else (i, j)))
        big_w[both] = w[blocks[-1][1]]
    votes = p.matrix_votes(children, big_w)
    if offset is not None:
        row, column = np.repeat(offset[:, :, 0, 3].ravel(), I), np.repeat(offset[:, :, 1, 3].ravel(), I)
        votes = p.add_coordinates(votes, row, column)
    is_seen, unit = seen.any(axis=1), seen.any(axis=1).sum() / seen.shape[1]
    inputs = (votes.reshape(*big_w.shape[:2], P * P)[is_seen], a.reshape(-1)[is_seen],
              np.tile(beta_a, n_fields), np.tile(beta_v, n_fields), lambdas, floor)
    mu_page, a_page, steps = p.em_routing(*inputs, unit, seen[is_seen])
    same(mu_page.reshape(mu.shape), mu)
    same(a_page.reshape(activation.shape), activation)
    dvotes, da_in, *dbetas = p.em_routing_backward(dmu.reshape(-1, P * P), da.reshape(-1), *inputs, steps, unit)
    dvotes_all, da_all, dw = np.zeros((*big_w.shape[:2], P * P)), np.zeros(len(votes)), np.zeros_like(w)
    dvotes_all[is_seen], da_all[is_seen] = dvotes, da_in
    dvotes_all = p.add_coordinates_backward(dvotes_all.reshape(big_w.shape))
    dpose, dbig_w = p.matrix_votes_backward(dvotes_all, children, big_w)
    for both, place in blocks:
        dw[place] += dbig_w[both]
    ours = (dpose, da_all, dw, *(dbeta.reshape(n_fields, J).sum(axis=0) for dbeta in dbetas))
    for grad, expected in zip(ours, grads, strict=True):
        same(grad.reshape(expected.shape), expected)


def test_losses() -> None:
    p, draw = page(), rng()
    v, target = draw.normal(size=(10, 16)) * 0.2, np.eye(10)[3] + np.eye(10)[5]
    lengths = np.sqrt((v * v).sum(axis=1) + multimnist.SQUASH_EPS)
    loss, dlengths = multimnist.margin_loss(lengths[None], target[None], 1)
    a, scores = draw.uniform(size=(2, 5))
    drawn, digit = draw.uniform(size=(2, 36))
    error, ddrawn = multimnist.squared_error(drawn[None], digit[None], 1)
    of_class = np.array([2])
    for ours, expected, dexpected in (
        (p.margin_loss(v, target), loss, v * (dlengths[0] / lengths)[:, None]),
        *((p.spread_loss(a, 2, margin), *smallnorb.spread_loss(a[None], of_class, margin)) for margin in (0.2, 0.9)),
        (p.cross_entropy(scores, 2), *smallnorb.softmax_cross_entropy(scores[None], of_class)),
        (p.reconstruction_loss(drawn, digit, 0.005), 0.005 * error, 0.005 * ddrawn),
    ):
        same(ours[0], expected)
        same(ours[1], np.squeeze(dexpected))


def test_score() -> None:
    """Of a network; and its gradient by differences."""
    config = smallnorb.Config(dtype="float64", loss="cross-entropy")
    capsules = smallnorb.make_models(config)["capsules"]
    x = rng().uniform(size=(2, smallnorb.IMAGE_SIZE, smallnorb.IMAGE_SIZE, 1))
    scores, cache = capsules.forward(capsules.init_params(rng()), x)
    for b in range(2):
        same(page().score(cache.mu[b], cache.a[b]), scores[b])
    inputs, dscore = {"mu": cache.mu[0], "a": cache.a[0]}, rng().normal(size=5)
    dmu, da = page().score_backward(dscore, cache.mu[0])
    score = page().score
    check_gradient(lambda mu, a: float((score(mu, a) * dscore).sum()), inputs, {"mu": dmu, "a": da}, rng())


def in_both(name: str, inputs: dict[str, Array], backward: Any, *more: Any) -> None:
    """A function in numpy and in PyTorch: the results, and what ``backward(douts, out)`` and autograd say of inputs."""
    torch = pytest.importorskip("torch")
    ours = getattr(page(), name)(*inputs.values(), *more)
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs.values()]
    more = tuple(torch.tensor(x) if isinstance(x, np.ndarray) else x for x in more)
    theirs = getattr(page_with_torch(), f"{name}_torch")(*tensors, *more)
    outs = theirs if isinstance(theirs, tuple) else (theirs,)
    for out, expected in zip(outs, ours if isinstance(ours, tuple) else (ours,), strict=False):
        same(out.detach().numpy(), expected)
    douts = [rng().normal(size=tuple(out.shape)) for out in outs]
    torch.autograd.backward(outs, [torch.tensor(dout) for dout in douts])
    for x, grad in zip(tensors, backward(*douts, ours), strict=True):
        same(x.grad.numpy(), grad)


def test_pytorch_takes_a_batch() -> None:
    """Of two images it gives what it gives of each."""
    torch = pytest.importorskip("torch")
    p, draw, (B, I, J, P, D) = page_with_torch(), rng(), (2, 5, 4, 3, 2)
    seen = torch.tensor(draw.uniform(size=(I, J)) < 0.7)
    seen[:, 0] = True
    betas = [torch.tensor(draw.normal(size=J)) for _ in range(2)]
    poses, matrices, activations, votes, grid = (torch.tensor(draw.uniform(size=shape)) for shape in (
        (B, I, P), (B, I, 4, 4), (B, I), (B, I, J, D), (B, I, J, 4, 4)))
    w, w_matrix = torch.tensor(draw.normal(size=(I, J, P, D))), torch.tensor(draw.normal(size=(I, J, 4, 4)))
    places = torch.tensor(draw.uniform(size=(2, I)))

    for function, inputs in (
            (lambda u: p.votes_torch(u, w), [poses]), (lambda v: p.dynamic_routing_torch(v, 3), [votes]),
            (lambda m: p.matrix_votes_torch(m, w_matrix), [matrices]),
            (lambda v: p.add_coordinates_torch(v, *places), [grid]),
            (lambda v, a: p.em_routing_torch(v, a, *betas, [0.4, 0.7], 0.3, 1.0, seen)[0], [votes, activations]),
            (lambda v, a: p.em_routing_torch(v, a, *betas, [0.4, 0.7], 0.3)[1], [votes, activations])):
        each = torch.stack([function(*(x[b] for x in inputs)) for b in range(B)])
        same(function(*inputs).numpy(), each.numpy())


def test_pytorch_beside_the_numpy_gives_the_same() -> None:
    pytest.importorskip("torch")
    p, draw, (I, J, P, D) = page(), rng(), (5, 4, 3, 2)
    inputs = {"u": draw.normal(size=(I, P)), "w": draw.normal(size=(I, J, P, D))}
    in_both("votes", inputs, lambda dout, _: p.votes_backward(dout, **inputs))
    s = draw.normal(size=(I, D))
    in_both("squash", {"s": s}, lambda dv, _: (p.squash_backward(dv, s),))
    u_hat = draw.normal(size=(I, J, D))
    in_both("dynamic_routing", {"u_hat": u_hat}, lambda dv, out: (p.dynamic_routing_backward(dv, u_hat, out[1]),), 3)
    poses = {"m": draw.normal(size=(I, 4, 4)), "w": draw.normal(size=(I, J, 4, 4))}
    in_both("matrix_votes", poses, lambda dout, _: p.matrix_votes_backward(dout, **poses))
    row, column = draw.uniform(size=(2, I))
    in_both("add_coordinates", {"votes": draw.normal(size=(I, J, 4, 4))},
            lambda dout, _: (p.add_coordinates_backward(dout),), row, column)

    fit = {"r": draw.dirichlet(np.ones(J), I), "a": draw.uniform(0.1, 0.9, I), "votes": u_hat,
           "beta_a": draw.normal(size=J), "beta_v": draw.normal(size=J)}
    more = (0.7, 0.3, 1.7)
    in_both("m_step", fit, lambda dmu, dsigma_sq, dz, _: p.m_step_backward(dmu, dsigma_sq, dz, *fit.values(), *more),
            *more)
    gaussians = {"mu": draw.normal(size=(J, D)), "sigma_sq": draw.uniform(0.5, 2, (J, D)), "z": draw.normal(size=J),
                 "votes": u_hat}
    seen = draw.uniform(size=(I, J)) < 0.7
    seen[:, 0] = True
    in_both("e_step", gaussians, lambda dr, r: p.e_step_backward(dr, r, **gaussians), seen)
    routed = {name: fit[name] for name in ("votes", "a", "beta_a", "beta_v")}
    lambdas = [0.4, 0.7, 1.1]
    in_both("em_routing", routed, lambda dmu, da, out: p.em_routing_backward(
        dmu, da, *routed.values(), lambdas, 0.3, out[2], 1.0), lambdas, 0.3, 1.0)

    def of_loss(dloss: Array, out: Any) -> tuple[Array]:
        return (dloss * out[1],)

    batch = draw.normal(size=(2, I, J, D))
    in_both("dynamic_routing", {"u_hat": batch}, lambda dv, out: (p.dynamic_routing_backward(dv, batch, out[1]),), 3)
    in_both("margin_loss", {"v": draw.normal(size=(10, 3)) * 0.4}, of_loss, np.eye(10)[3] + np.eye(10)[5])
    in_both("spread_loss", {"a": draw.uniform(size=5)}, of_loss, 2, 0.9)
    in_both("cross_entropy", {"score": draw.normal(size=5)}, of_loss, 2)
    in_both("reconstruction_loss", {"drawn": draw.uniform(size=36)}, of_loss, draw.uniform(size=36), 0.005)
    mu = {"mu": draw.normal(size=(J, D)), "a": draw.uniform(size=J)}
    in_both("score", mu, lambda dscore, _: p.score_backward(dscore, mu["mu"]))
