"""The nine functions that the exercises ask for, and what they need: the text of docs/capsule_reference.md.

Shapes: I children, J parents, D entries of a vote; dots stand for a batch, or for nothing. The check compares with
these functions, and plants mistakes in them to find out which one a student made.
"""

# mypy: disallow-untyped-defs=False
import numpy as np


def softmax(b):  # over the last axis
    e = np.exp(b - b.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def squash(s):  # (..., D) -> the same shape
    q = (s * s).sum(axis=-1, keepdims=True) + 1e-9
    return np.sqrt(q) / (1 + q) * s


# exercise 1
def squash_backward(dv, s):
    q = (s * s).sum(axis=-1, keepdims=True) + 1e-9
    f = np.sqrt(q) / (1 + q)
    twice_df = (1 - q) / (np.sqrt(q) * (1 + q) ** 2)
    return f * dv + twice_df * (s * dv).sum(axis=-1, keepdims=True) * s


# exercise 2
def softmax_backward(dc, c):
    return c * (dc - (c * dc).sum(axis=-1, keepdims=True))


# exercise 3
def dynamic_routing(u_hat, n_iters):  # (..., I, J, D) -> v (..., J, D), and all c, s, v
    b = np.zeros(u_hat.shape[:-1])
    steps = []
    for _ in range(n_iters):
        c = softmax(b)
        s = np.einsum("...ij,...ijd->...jd", c, u_hat)
        v = squash(s)
        b = b + np.einsum("...ijd,...jd->...ij", u_hat, v)
        steps.append((c, s, v))
    return v, steps


# exercise 4
def dynamic_routing_backward(dv, u_hat, steps):
    du_hat, db = np.zeros_like(u_hat), np.zeros(u_hat.shape[:-1])
    for c, s, v in reversed(steps):
        # b' = b + sum_d u_hat v
        dv = dv + np.einsum("...ij,...ijd->...jd", db, u_hat)
        du_hat += db[..., None] * v[..., None, :, :]
        # v = squash(s)
        ds = squash_backward(dv, s)
        # s = sum_i c u_hat
        dc = np.einsum("...ijd,...jd->...ij", u_hat, ds)
        du_hat += c[..., None] * ds[..., None, :, :]
        # c = softmax(b)
        db = db + softmax_backward(dc, c)
        dv = np.zeros_like(dv)
    return du_hat


# exercise 5
def margin_loss(v, target):  # v (..., J, D), target (..., J) of 0 and 1 -> sum of the losses, dv
    length = np.sqrt((v * v).sum(axis=-1) + 1e-9)
    short, long = target * np.maximum(0, 0.9 - length), (1 - target) * np.maximum(0, length - 0.1)
    dlength = 0.5 * 2 * long - 2 * short
    return (short**2).sum() + 0.5 * (long**2).sum(), dlength[..., None] * v / length[..., None]


# exercise 6
def m_step(r, a, votes, beta_a, beta_v, lam, floor, unit=1.0):
    # r (I, J), a (I,), votes (I, J, D), beta_a and beta_v (J,) -> mu and sigma_sq (J, D), z (J,)
    mass = (r * a[:, None]).sum(axis=0) + 1e-8
    weight = r * a[:, None] / mass
    mu = np.einsum("ij,ijd->jd", weight, votes)
    sigma_sq = np.einsum("ij,ijd->jd", weight, (votes - mu) ** 2) + floor
    cost = (beta_v[:, None] + 0.5 * np.log(sigma_sq)).sum(axis=1) * mass / unit
    return mu, sigma_sq, lam * (beta_a - cost)


def m_step_backward(dmu, dsigma_sq, dz, r, a, votes, beta_a, beta_v, lam, floor, unit=1.0):
    mu, sigma_sq, z = m_step(r, a, votes, beta_a, beta_v, lam, floor, unit)
    g = r * a[:, None]
    mass = g.sum(axis=0) + 1e-8
    weight, cost, error = g / mass, beta_a - z / lam, votes - mu
    # z = lam (beta_a - cost)
    dbeta_a = lam * dz
    dcost = -lam * dz
    # cost = sum_d (beta_v + log sigma_sq / 2) mass / unit
    dbeta_v = mu.shape[1] * dcost * mass / unit
    dsigma_sq = dsigma_sq + (dcost * mass / unit)[:, None] / (2 * sigma_sq)
    dmass = dcost * cost / mass
    # sigma_sq = sum_i weight error^2 + floor
    dweight = np.einsum("jd,ijd->ij", dsigma_sq, error**2)
    derror = 2 * weight[:, :, None] * dsigma_sq * error
    # error = votes - mu
    dmu = dmu - derror.sum(axis=0)
    # mu = sum_i weight votes
    dweight += np.einsum("jd,ijd->ij", dmu, votes)
    dvotes = derror + weight[:, :, None] * dmu
    # weight = g / mass, mass = sum_i g
    dmass -= (dweight * weight).sum(axis=0) / mass
    dg = dweight / mass + dmass
    # g = r a
    return dg * a[:, None], (dg * r).sum(axis=1), dvotes, dbeta_a, dbeta_v


# exercise 7
def e_step(mu, sigma_sq, z, votes, seen=True):  # -> r (I, J); seen (I, J)
    log_p = -0.5 * ((votes - mu) ** 2 / sigma_sq + np.log(sigma_sq)).sum(axis=2)
    log_ap = -np.logaddexp(0, -z) + log_p
    return softmax(np.where(seen, log_ap, -np.inf))


def e_step_backward(dr, r, mu, sigma_sq, z, votes):
    error = votes - mu
    # r = softmax(log_ap)
    dlog_ap = softmax_backward(dr, r)
    # log_ap = log sigmoid(z) + log_p
    dz = dlog_ap.sum(axis=0) * (1 - sigmoid(z))
    # log_p = -sum_d (error^2 / sigma_sq + log sigma_sq) / 2
    dsigma_sq = np.einsum("ij,ijd->jd", dlog_ap, (error**2 / sigma_sq - 1) / (2 * sigma_sq))
    derror = -dlog_ap[:, :, None] * error / sigma_sq
    # error = votes - mu
    return -derror.sum(axis=0), dsigma_sq, dz, derror


# exercise 8
def spread_loss(a, true, margin):  # a (J,) -> loss, da
    shortfall = np.maximum(0, margin - (a[true] - a))
    shortfall[true] = 0
    da = 2 * shortfall
    da[true] = -da.sum()
    return (shortfall**2).sum(), da


# exercise 9
def network(patches, target, kernel, bias, w):
    s = (patches @ kernel + bias).reshape(w.shape[0], w.shape[2])
    u = squash(s)
    u_hat = np.einsum("ip,ijpd->ijd", u, w)
    v, steps = dynamic_routing(u_hat, 3)
    loss, dv = margin_loss(v, target)
    # u_hat = u w
    du_hat = dynamic_routing_backward(dv, u_hat, steps)
    dw = np.einsum("ijd,ip->ijpd", du_hat, u)
    du = np.einsum("ijd,ijpd->ip", du_hat, w)
    # s = patches kernel + bias, reshaped
    ds = squash_backward(du, s).reshape(len(patches), -1)
    return v, loss, patches.T @ ds, ds.sum(axis=0), dw
