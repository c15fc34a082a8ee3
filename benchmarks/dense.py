"""The step of Algorithm 1 as people usually write it: dense dispatch by a one-hot mask, and autograd.

Every patch goes through every expert; the mask then keeps one answer in M. Nothing here knows how the
data are made. `x` is (n, P, d), `theta` (d, M), `noise` (n, M); `W` is (M, J, d), in the released
variant (M, J, d + 1) with the biases in the last column.
"""

import torch
import torch.nn.functional as F


def as_written(x, y, theta, W, noise):
    """The loss (3.3): cubic experts, gated by the softmax of the noiseless logits."""
    h = x.sum(1) @ theta
    chosen = F.one_hot((h + noise).argmax(1), len(W)).to(x)
    answers = (torch.einsum("npd,mjd->npmj", x, W) ** 3).sum((1, 3))
    return F.softplus(-y * (h.softmax(1) * chosen * answers).sum(1)).mean()


def released(x, y, theta, W, noise):
    """The loss of the released notebooks: two logits per expert, a raw gate, a softmax before the cross-entropy."""
    x = 10 * x
    noisy = x.sum(1) @ theta + noise
    chosen = F.one_hot(noisy.argmax(1), len(W)).to(x)
    z = (torch.einsum("npd,mjd->npmj", x, W[:, :, :-1]) + W[:, :, -1]) ** 3
    logits = z.sum(1).unflatten(2, (2, -1)).sum(3)
    out = torch.einsum("nm,nmc->nc", noisy * chosen, logits).softmax(1)
    return F.cross_entropy(out, (y > 0).long())


LOSSES = {"as written": as_written, "released": released}


def norm(to_W, biases):
    """What an expert's step is divided by (Eq. 3.4); weights and biases count separately."""
    parts = (to_W[:, :, :-1], to_W[:, :, -1:]) if biases else (to_W,)
    total = sum(part.flatten(1).norm(dim=1) for part in parts)
    return total.masked_fill(total == 0, torch.inf)[:, None, None]


def step(x, y, theta, W, noise, eta, eta_r, variant="as written"):
    """One iteration in place; `theta` and `W` require gradients. Returns the loss before it."""
    theta.grad = W.grad = None
    loss = LOSSES[variant](x, y, theta, W, noise)
    loss.backward()
    with torch.no_grad():
        theta -= eta_r * theta.grad
        W -= eta * W.grad / norm(W.grad, biases=variant == "released")
    return loss.item()
