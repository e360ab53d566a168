"""Nine exercises on capsules: what to write, and the page to read first, are in lesson/README.md.

    cp lesson/exercises.py mine.py        Write your solutions into the stubs of mine.py.
    python mine.py                        Run the example by hand with your own routing.
    python -m lesson.check mine.py        See for each exercise whether it passes, and if not, what is wrong.

All arrays are float64, and of one image: I children, J parents, D entries of a vote. ``dx`` is the gradient of the loss
with respect to x, of x's shape. The check gives each function correct versions of all others: begin where you like.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def softmax(b: Array) -> Array:  # over the last axis
    e = np.exp(b - b.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def squash(s: Array) -> Array:  # (..., D) -> the same shape
    q = (s * s).sum(axis=-1, keepdims=True) + 1e-9
    return np.sqrt(q) / (1 + q) * s


# exercise 1
def squash_backward(dv: Array, s: Array) -> Array:
    """dv (n, D), s (n, D) -> ds (n, D), the gradient of v = squash(s). It is finite where s is 0."""
    raise NotImplementedError


# exercise 2
def softmax_backward(dc: Array, c: Array) -> Array:
    """dc (n, J), c (n, J) -> db (n, J), the gradient of c = softmax(b)."""
    raise NotImplementedError


# exercise 3
def dynamic_routing(u_hat: Array, n_iters: int) -> tuple[Array, list[tuple[Array, Array, Array]]]:
    """Votes (I, J, D) -> v (J, D), and a list of (c, s, v) of every iteration. [Sabour 2017, procedure 1]

    Couplings c (I, J), whose sum over the parents is 1; inputs s (J, D); outputs v (J, D). The logits b are 0 at first.
    """
    raise NotImplementedError


# exercise 4
def dynamic_routing_backward(dv: Array, u_hat: Array, steps: list[tuple[Array, Array, Array]]) -> Array:
    """dv (J, D), u_hat (I, J, D), steps as dynamic_routing returns them -> du_hat (I, J, D), through all iterations."""
    raise NotImplementedError


# exercise 5
def margin_loss(v: Array, target: Array) -> tuple[float, Array]:
    """Digit capsules v (J, D), target (J,) of 0 and 1 -> the loss, and dv (J, D), which is finite where v is 0.
    [Sabour 2017, eq. 4]"""
    raise NotImplementedError


# exercise 6
def m_step(
    r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array, lam: float, floor: float
) -> tuple[Array, Array, Array]:
    """Assignments r (I, J), activations a (I,), votes (I, J, D), beta_a and beta_v (J,) -> mu (J, D), sigma_sq (J, D),
    and z (J,), whose sigmoid is the parent's activation. [Hinton 2018, procedure 1]

    ``floor`` is added to the variance; the mass is sum_i r a + 1e-8; beta_v is counted once for each of the D entries.
    """
    raise NotImplementedError


def m_step_backward(
    dmu: Array, dsigma_sq: Array, dz: Array,
    r: Array, a: Array, votes: Array, beta_a: Array, beta_v: Array, lam: float, floor: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """-> dr (I, J), da (I,), dvotes (I, J, D), dbeta_a (J,), dbeta_v (J,)."""
    raise NotImplementedError


# exercise 7
def e_step(mu: Array, sigma_sq: Array, z: Array, votes: Array) -> Array:
    """Gaussians mu and sigma_sq (J, D), z (J,), votes (I, J, D) -> assignments r (I, J), whose sum over the parents is
    1: r is proportional to sigmoid(z) times the density of the vote. Compute it in logarithms."""
    raise NotImplementedError


def e_step_backward(
    dr: Array, r: Array, mu: Array, sigma_sq: Array, z: Array, votes: Array
) -> tuple[Array, Array, Array, Array]:
    """dr (I, J), r as e_step returns it -> dmu (J, D), dsigma_sq (J, D), dz (J,), dvotes (I, J, D)."""
    raise NotImplementedError


# exercise 8
def spread_loss(a: Array, true: int, margin: float) -> tuple[float, Array]:
    """Activations a (J,), the index of the true class, the margin -> the loss, and da (J,). [Hinton 2018, eq. 3]"""
    raise NotImplementedError


# exercise 9
def network(
    patches: Array, target: Array, kernel: Array, bias: Array, w: Array
) -> tuple[Array, float, Array, Array, Array]:
    """A CapsNet of one image: patches (N, K), target (J,) of 0 and 1; kernel (K, C), bias (C,), w (I, J, P, D), where
    N C = I P -> digit capsules v (J, D), the margin loss, and its gradients dkernel, dbias, dw.

    The children are u = squash(s), where s (I, P) is patches @ kernel + bias, reshaped. The vote of child i for parent
    j is u[i] @ w[i, j]. Three iterations of routing. Call your functions of exercises 1 to 5.
    """
    raise NotImplementedError


if __name__ == "__main__":  # the example by hand, with your dynamic_routing
    example = np.array([[[1, 0], [0, 1]], [[1, 0], [0, -1]], [[1, 0], [1, 0]], [[-1, 0], [-1, 0]]], float)
    try:
        found = dynamic_routing(example, 3)[1]
    except NotImplementedError:
        raise SystemExit("dynamic_routing, exercise 3, is not written yet") from None
    for t, (c, _, v) in enumerate(found):
        print(f"iteration {t + 1}: couplings to A {c[:, 0].round(2)}, lengths of A and B {np.hypot(*v.T).round(2)}")
