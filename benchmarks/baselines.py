"""A step of Algorithm 1 as a good engineer would write it who is given patches and labels only.

`x` is (n, P, d), `total` (n, d) the sums of its patches, which no step changes, `theta` (d, M), `W`
(M, J, d), `noise` (n, M). Experts are cubic and the gate is the softmax of the noiseless logits.
"""

import torch
import torch.nn.functional as F


def dense_loss(x, total, y, theta, W, noise):
    """The loss (3.3): every patch through every expert, a one-hot mask keeps one answer in M."""
    h = total @ theta
    chosen = F.one_hot((h + noise).argmax(1), len(W)).to(x)
    answers = (torch.einsum("npd,mjd->npmj", x, W) ** 3).sum((1, 3))
    return F.softplus(-y * (h.softmax(1) * chosen * answers).sum(1)).mean()


def by_expert(x, m, M):
    """The order of the examples by expert, and each expert's patches."""
    order, sizes = m.argsort(), m.bincount(minlength=M).tolist()
    return order, [own.flatten(0, 1) for own in x.index_select(0, order).split(sizes)]


def sorted_loss(x, total, y, theta, W, noise):
    """The loss (3.3): the examples sorted by expert, one product for each."""
    h = total @ theta
    m = (h + noise).argmax(1)
    order, patches = by_expert(x, m, len(W))
    f = torch.cat([(own @ w.T).pow(3).sum(1) for own, w in zip(patches, W, strict=True)]).view(len(x), -1).sum(1)
    gate = h.softmax(1).gather(1, m[:, None]).squeeze(1)
    return F.softplus(-(y * gate)[order] * f).mean()


def sorted_gradients(x, total, y, theta, W, noise):
    """The same loss and, by Eq. E.1 and E.2, its gradients in theta and W."""
    n, M = noise.shape
    h = total @ theta
    m, pi = (h + noise).argmax(1), h.softmax(1)
    order, patches = by_expert(x, m, M)
    signed = (y * pi.gather(1, m[:, None]).squeeze(1))[order]
    Z = torch.cat([own @ w.T for own, w in zip(patches, W, strict=True)]).view(n, -1)
    margin = signed * Z.pow(3).sum(1)
    slope = -torch.sigmoid(-margin) / n
    S = Z.square().mul_((3 * slope * signed)[:, None]).view(-1, W.shape[1])
    to_W = [s.T @ own for s, own in zip(S.split([len(own) for own in patches]), patches, strict=True)]
    pull = torch.empty_like(y).index_copy_(0, order, slope * margin)
    to_h = F.one_hot(m, M).to(pi).sub_(pi).mul_(pull[:, None])
    return F.softplus(-margin).mean(), total.T @ to_h, torch.stack(to_W)
