"""The least squares estimator of Eq. 3 and 9 of Nguyen et al. (2025), by Levenberg-Marquardt steps.

Many problems of one size are solved at once. The unknowns of a problem are the embeddings s, not the
vectors beta1 behind them: in s the three routers are one model, `<s_i, u(x)> + beta0_i`, and differ
in the set s may range over: a sphere (cosine), or the ball that a compact parameter space leaves.

The normal matrix of m rows takes `m p^2` multiplications for `p = 2 k (d + 1)` unknowns; everything else is O(n k d).
Beyond `ROWS` rows it is therefore formed from the first `ROWS`, which changes the step and not where it
stops: gradient and sum of squares always come from all rows.

A descent that gains nothing need not have arrived. Were the residuals r linear in the unknowns, the best step would
take `g^T H^+ g` off the sum of squares, `g = J^T r`, `H = J^T J`: the squared length of the projection of r on the
tangent space. Over the residual variance `|r|^2 / n` it is `promise = n cos^2(r, tangent space)`, which no change of
units or of unknowns alters (Bates and Watts 1981, up to a factor (n - p) / (n p)) and which is 0 at a minimum. Held
against a tolerance t it says that the point lies within sqrt(t) standard errors of where the best step leads. As H is
a sum in single precision, curvatures below `ROUNDING` of its diagonal are not told from zero; they are damped by as
much. At a minimum on kinks of ReLU experts the promise need not vanish: each adds up to about the leverage of its
example, which falls as 1 / n.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.models.experts import Activation
from moe_theory.models.mixture import MixingMeasure, expert_profile, slopes
from moe_theory.models.routers import Router

ROWS = 10_000
CHUNK = 2_000
PATIENCE = 3  # steps in a row that gain little before the descent stops
LARGEST_DAMPING = 1e8
ROUNDING = 1e-6  # relative, of the normal matrix
#: Share of the bound within which an embedding that is pulled out goes to the bound with the next step. If it were
#: left inside, the other unknowns would be moved as if it went out, and only tiny steps be accepted.
AT_BOUND = 1e-3


class Estimate(NamedTuple):
    """What `least_squares` found for B problems.

    Attributes:
        G: B measures.
        sse: (B,) sums of squared residuals.
        gain: (B,) the most that one of the last three steps took off the sum of squares, over the residual
            variance sse / n: a statistic that noise alone moves by about the number of unknowns.
        promise: (B,) what the best step from the end would take off the sum of squares if the residuals were
            linear in the unknowns, in the same unit: 0 at a stationary point.
        steps: (B,) accepted steps.
        converged: (B,) whether `gain` and `promise` came down to the tolerance.
    """

    G: list[MixingMeasure]
    sse: Float[Tensor, " B"]
    gain: Float[Tensor, " B"]
    promise: Float[Tensor, " B"]
    steps: Int[Tensor, " B"]
    converged: Bool[Tensor, " B"]


class Problems(NamedTuple):
    """B data sets, features U = (1, u(x)), inputs X = (x, 1), responses y, and the profile of the experts."""

    U: Float[Tensor, "B n q"]
    X: Float[Tensor, "B n q"]
    y: Float[Tensor, "B n"]
    phi: Activation

    def some(self, which: Int[Tensor, " b"]) -> "Problems":
        """The problems named, without a copy if they are all."""
        if len(which) == len(self.y):
            return self
        return Problems(self.U[which], self.X[which], self.y[which], self.phi)

    def rows(self, which: Int[Tensor, "B m"]) -> "Problems":
        """The examples named, of every problem its own."""
        B, n = self.y.shape
        flat = (which + n * torch.arange(B, device=which.device)[:, None]).flatten()
        some = [a.flatten(0, 1).index_select(0, flat).unflatten(0, which.shape) for a in (self.U, self.X, self.y)]
        return Problems(*some, self.phi)  # pyright: ignore[reportCallIssue]


def problems(x: Float[Tensor, "B n d"], y: Float[Tensor, "B n"], router: Router, expert: str) -> Problems:
    """Data sets as `evaluate` reads them; expert is a key of `moe_theory.models.mixture.EXPERTS`."""
    one = torch.ones_like(x[..., :1])
    return Problems(torch.cat([one, router.feature(x)], -1), torch.cat([x, one], -1), y, expert_profile(expert))


def unknowns(G: MixingMeasure, router: Router) -> Float[Tensor, "2 k q"]:
    """`(beta0, s)` and `(a, b)` of every atom."""
    return torch.stack([torch.cat([G.beta0[:, None], router.embedding(G.beta1)], 1), G.eta])


def evaluate(at: Float[Tensor, "B 2 k q"], data: Problems) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals r (B, n) and the weights w, v (B, n, k) of the Jacobian's two blocks.

    The row of the Jacobian of an input is `(w_i U, v_i X)_i`, see `moe_theory.models.mixture.slopes`.
    """
    f, w, v = slopes(data.U @ at[:, 0].mT, data.X @ at[:, 1].mT, data.phi)
    return data.y - f, w, v


def gradient(r: Tensor, w: Tensor, v: Tensor, data: Problems) -> Float[Tensor, "B 2 k q"]:
    """`J^T r`, from all rows."""
    r = r[..., None]
    return torch.stack([(w * r).mT @ data.U, (v * r).mT @ data.X], 1)


def normal_matrix(w: Tensor, v: Tensor, data: Problems) -> Float[Tensor, "B p p"]:
    """`J^T J` of all rows, or of the first `ROWS` times n / ROWS, summed in single precision.

    J has two blocks of columns; the product of the second with the first is the transpose of a product
    already there.
    """
    B, n, k = w.shape
    rows, half = min(n, ROWS), k * data.U.shape[-1]
    H = w.new_zeros(B, 2, half, 2, half, dtype=torch.float32)
    factors = [(a[:, :rows].float(), b[:, :rows].float()) for a, b in ((w, data.U), (v, data.X))]
    for start in range(0, rows, CHUNK):
        part = slice(start, start + CHUNK)
        first, second = ((a[:, part, :, None] * b[:, part, None]).flatten(2) for a, b in factors)
        for i, left, j, right in ((0, first, 0, first), (0, first, 1, second), (1, second, 1, second)):
            H[:, i, :, j] += left.mT @ right
    H[:, 1, :, 0] = H[:, 0, :, 1].mT
    return H.view(B, 2 * half, 2 * half).to(w) * (n / rows)


def projected(H: Tensor, g: Tensor, normal: Tensor) -> tuple[Tensor, Tensor]:
    """H and g without the directions `normal`, on which H becomes its own mean diagonal."""
    B, _, k, q = g.shape
    Q = g.new_zeros(B, 2, k, q, k)
    Q[:, 0, :, 1:] = torch.diag_embed(normal.permute(0, 2, 1)).permute(0, 2, 1, 3)
    Q, flat = Q.view(B, -1, k), g.flatten(1)[..., None]
    H = H - Q @ (Q.mT @ H)
    H = H - (H @ Q) @ Q.mT
    scale = H.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    return H + scale * (Q @ Q.mT), (flat - Q @ (Q.mT @ flat))[..., 0]


@dataclass(frozen=True)
class Domain:
    """Where the embeddings of a router may be: a ball, or a sphere.

    Args:
        router: which of the two, and which common shifts of the embeddings change no function.
        bound: the radius.
    """

    router: Router
    bound: float

    def normals(
        self, at: Float[Tensor, "B 2 k q"], pull: Float[Tensor, "B 2 k q"], margin: float = 1e-9
    ) -> Float[Tensor, "B k d"]:
        """Unit normals of atoms whose embedding is at the bound, up to a margin, and pulled out; zero for the rest."""
        s, pull = at[:, 0, :, 1:], pull[:, 0, :, 1:]
        norm = s.norm(dim=-1, keepdim=True)
        outward = (norm >= self.bound * (1 - margin)) & ((s * pull).sum(-1, keepdim=True) > 0)
        return s / norm.clamp_min(1e-300) * (outward | self.router.sphere)

    def free(self, normal: Float[Tensor, "B k d"]) -> Bool[Tensor, " B"]:
        """Whether steps leave out the common shift: on the sphere, or in the ball if no embedding is held.

        So a measure with an embedding at the bound can move away from there as a whole.
        """
        return (normal == 0).all(-1).all(-1) | self.router.sphere

    def constrained(self, step: Tensor, at: Tensor, free: Bool[Tensor, " B"]) -> Float[Tensor, "B 2 k q"]:
        """The step with its part along the gauge removed: `sum_i dbeta0_i = 0`, where `free` the common shift of s."""
        step = step.clone()
        step[:, 0, :, 0] -= step[:, 0, :, 0].mean(1, keepdim=True)
        shift = step[:, 0, :, 1:].mean(1, keepdim=True) @ self.router.gauge(at[:, 0, :, 1:])
        step[:, 0, :, 1:] -= shift * free[:, None, None]
        return step

    def retracted(self, at: Float[Tensor, "B 2 k q"], normal: Float[Tensor, "B k d"]) -> Float[Tensor, "B 2 k q"]:
        """The embeddings brought along their rays back into the ball, or where one is held by a normal to the bound."""
        at, norm = at.clone(), at[:, 0, :, 1:].norm(dim=-1, keepdim=True)
        held = (normal != 0).any(-1, keepdim=True)
        at[:, 0, :, 1:] *= torch.where((norm > self.bound) | held, self.bound / norm, 1.0)
        return at


@dataclass(frozen=True)
class State:
    """Where B descents stand.

    Attributes:
        at: the unknowns; sse: their sums of squares; damping: of the next step; steps: accepted so far.
        gains: what each of the last steps took off the sum of squares, over the residual variance sse / n.
    """

    at: Float[Tensor, "B 2 k q"]
    sse: Float[Tensor, " B"]
    damping: Float[Tensor, " B"]
    gains: Float[Tensor, "B steps"]
    steps: Int[Tensor, " B"]

    @classmethod
    def start(cls, at: Float[Tensor, "B 2 k q"], data: Problems) -> "State":
        """The state before the first step."""
        sse = evaluate(at, data)[0].square().sum(1)
        gains = sse.new_full((len(sse), PATIENCE), torch.inf)
        return cls(at, sse, torch.full_like(sse, 1e-3), gains, torch.zeros_like(sse, dtype=torch.long))

    @property
    def gain(self) -> Float[Tensor, " B"]:
        return self.gains.amax(1)

    def some(self, which: Int[Tensor, " b"]) -> "State":
        return State(*(getattr(self, f.name)[which] for f in fields(self)))

    def put(self, which: Int[Tensor, " b"], other: "State") -> "State":
        return State(*(getattr(self, f.name).index_put((which,), getattr(other, f.name)) for f in fields(self)))


def least_squares(
    x: Float[Tensor, "B n d"],
    y: Float[Tensor, "B n"],
    start: list[MixingMeasure],
    router: Router,
    expert: str = "relu",
    *,
    radius: float = 1.0,
    tolerance: float = 0.05,
    steps: int = 60,
) -> Estimate:
    """Local minimizers of `sum_i (y_i - f_G(x_i))^2`, one for each of B data sets, from given starts.

    Args:
        x, y: the data.
        start: B measures with the same number of atoms.
        router: the fitted router; for the cosine the norms of the starts' beta1 come back unchanged.
        expert: a key of `moe_theory.models.mixture.EXPERTS`.
        radius: bound on |beta1|, the compact parameter space of assumption A.1 (linear, perturbed).
        tolerance: stop when three steps in a row gain no more than this each (see `Estimate`); the end counts as
            a minimizer if the best step promises no more either.
        steps: stop after so many.

    Raises:
        ValueError: for shapes that do not match, numbers that are not finite, a start outside the radius, or a
            descent on which an expert's derivatives vanish at all inputs.
    """
    check.finite("x", x)
    check.finite("y", y)
    check.positive("radius", radius)
    check.positive("tolerance", tolerance)
    check.integer("steps", steps, 1)
    if x.ndim != 3 or y.shape != x.shape[:2] or len(start) != len(x):
        raise ValueError(f"y, start: expected B = {len(x)} and n = {x.shape[1]}, got {tuple(y.shape)}, {len(start)}")
    # what this function returned, at the bound up to rounding, may start it again
    if not router.sphere and max(float(G.beta1.norm(dim=1).max()) for G in start) > radius * (1 + 1e-12):
        raise ValueError(f"start: expected every |beta1| <= radius = {radius}")
    data, domain = problems(x, y, router, expert), Domain(router, router.bound(radius))
    state = State.start(torch.stack([unknowns(G, router) for G in start]), data)
    try:
        for _ in range(steps):
            live = (state.gain > tolerance).nonzero()[:, 0]
            if not len(live):
                break
            state = state.put(live, _stepped(state.some(live), data.some(live), domain))
        promise = _promise(state, data, domain)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise ValueError(
            f"y, start, expert: expected data that {expert!r} experts fit from these starts, got some for which an"
            " expert saturates, so that no small change of it is seen in the data"
        ) from error
    found = [_measure(end, G, router) for end, G in zip(state.at, start, strict=True)]
    converged = (state.gain <= tolerance) & (promise <= tolerance)
    return Estimate(found, state.sse, state.gain, promise, state.steps, converged)


def _measure(at: Float[Tensor, "2 k q"], start: MixingMeasure, router: Router) -> MixingMeasure:
    beta1 = router.preimage(at[0, :, 1:])
    if router.sphere:
        beta1 = beta1 * start.beta1.norm(dim=1, keepdim=True)
    return MixingMeasure(at[0, :, 0].clone(), beta1, at[1].clone())


def _stepped(state: State, data: Problems, domain: Domain) -> State:
    """One accepted step of each descent, damped until the sum of squares falls, or no step and a large damping.

    The damping is relative to the diagonal of H, which is why H is taken to a basis in which beta0_i
    moves together with -eta_i: nearly constant gates let a homogeneous expert trade its weight against
    its size almost freely, and a damping by the size of beta0_i alone would never let it.
    """
    r, w, v = evaluate(state.at, data)
    g, C = gradient(r, w, v, data), trades(state.at)
    normal = domain.normals(state.at, g, AT_BOUND)
    H, g = projected(normal_matrix(w, v, data), g, normal)
    H, g = C.mT @ H @ C, (C.mT @ g[..., None])[..., 0]
    diagonal, free = torch.diag_embed(H.diagonal(dim1=1, dim2=2)), domain.free(normal)
    sse, there, damping = state.sse.clone(), state.at.clone(), state.damping.clone()
    waiting = torch.arange(len(sse), device=sse.device)
    while len(waiting):
        A = H[waiting] + diagonal[waiting] * damping[waiting, None, None]
        here = state.at[waiting]
        step = (C[waiting] @ torch.linalg.solve(A, g[waiting])[..., None]).view_as(here)
        tried = domain.retracted(here + domain.constrained(step, here, free[waiting]), normal[waiting])
        new = evaluate(tried, data.some(waiting))[0].square().sum(1)
        better = new < sse[waiting]
        there[waiting[better]], sse[waiting[better]] = tried[better], new[better]
        damping[waiting] *= torch.where(better, 0.1, 10.0)
        waiting = waiting[~better & (damping[waiting] < LARGEST_DAMPING)]
    gained = (state.sse - sse) * data.y.shape[1] / sse
    gains = torch.cat([state.gains[:, 1:], gained[:, None]], 1)
    return State(there, sse, damping.clamp(1e-9, LARGEST_DAMPING / 10), gains, state.steps + (sse < state.sse))


def _promise(state: State, data: Problems, domain: Domain) -> Float[Tensor, " B"]:
    """`n g^T H^+ g / |r|^2`, n times the squared cosine between the residuals and the tangent space.

    A held embedding moves along its sphere, `s + ds - s |ds|^2 / 2 |s|^2`, against the pull that holds it:
    a step gains `2 g.d - d^T H d - sum_i (s_i.g_i / |s_i|^2) |ds_i|^2`, and H gets that curvature added.
    """
    at = state.at
    r, w, v = evaluate(at, data)
    g = gradient(r, w, v, data)
    normal, curvature = domain.normals(at, g), torch.zeros_like(g)
    pull = (normal * g[:, 0, :, 1:]).sum(-1, keepdim=True).clamp_min(0)
    curvature[:, 0, :, 1:] = pull / at[:, 0, :, 1:].norm(dim=-1, keepdim=True).clamp_min(1e-300)
    H, g = projected(normal_matrix(w, v, data) + torch.diag_embed(curvature.flatten(1)), g, normal)
    C = trades(at)
    H, g = C.mT @ H @ C, C.mT @ g[..., None]
    H = H + ROUNDING * torch.diag_embed(H.diagonal(dim1=1, dim2=2))
    return (g * torch.linalg.solve(H, g)).sum((1, 2)) * data.y.shape[1] / state.sse


def trades(at: Float[Tensor, "B 2 k q"]) -> Float[Tensor, "B p p"]:
    """The basis of the unknowns in which a unit of beta0_i also moves the expert by -eta_i."""
    B, _, k, q = at.shape
    C = torch.eye(2 * k * q, dtype=at.dtype, device=at.device).repeat(B, 1, 1).view(B, 2, k, q, 2, k, q)
    i = torch.arange(k, device=at.device)
    C[:, 1, i, :, 0, i, 0] = -at[:, 1].transpose(0, 1)
    return C.view(B, 2 * k * q, 2 * k * q)
