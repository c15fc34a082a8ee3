"""Tasks, networks and closed forms of the chapter beyond Gaussians."""

import math

import pytest
import torch

from moe_book.experiments import beyond
from moe_theory.measure.sparsity import average_sparsity
from moe_theory.models.gated import HeadedMoE, TopTwoMoE
from moe_theory.models.soft import SoftMoE
from moe_theory.models.token_networks import TokenMoE, TokenNets
from moe_theory.tasks.dictionary import DictionaryTask
from moe_theory.tasks.gaussians import GaussianMixture
from moe_theory.tasks.subspaces import SubspaceTask
from moe_theory.tasks.tokens import TokenTask
from moe_theory.theory import components as exact
from moe_theory.theory.frozen import best_frozen, start_sparsity

F64 = dict(dtype=torch.float64)


@pytest.mark.parametrize("output", ["linear", "quadratic"])
def test_labels_of_sequences_are_sums_of_variance_one(output):
    task = TokenTask(6, 5, 3, output=output, seed=2)
    b = task.sample(40_000, 1, **F64)
    term = (task.w[b.cluster] * b.x).sum(2)
    y = (term if output == "linear" else term**2).sum(1) / task.scale
    assert torch.allclose(b.y[:, 0], y) and abs(float(b.y.var()) - 1) < 0.04
    assert torch.equal(TokenTask(6, 5, 9, seed=2).mean, task.mean)
    off = b.x - task.mean[b.cluster]
    assert abs(float(off.std()) / task.sigma - 1) < 0.01


@pytest.mark.parametrize("label", ["input", "atoms"])
@pytest.mark.parametrize("r", [2, 3])
def test_sums_are_of_distinct_atoms_with_labels_of_variance_one(label, r):
    task = DictionaryTask(7, 5, r=r, label=label, seed=3)
    b = task.sample(40_000, 1, **F64)
    assert len(task.subsets) == math.comb(7, r) and (b.atoms.diff(dim=1) > 0).all()
    left = b.x - task.mean[b.atoms].sum(1)
    assert abs(float(left.square().sum(1).mean()) / (r * task.sigma**2) - 1) < 0.02
    w, mean = task.w[b.atoms], task.mean[b.atoms]
    y = torch.einsum("nrd,nd->n", w, b.x) if label == "input" else (w * mean).sum((1, 2))
    assert torch.allclose(b.y[:, 0], y / task.scale) and abs(float(b.y.var()) - 1) < 0.04


@pytest.mark.parametrize("label", ["point", "noise"])
def test_points_lie_near_their_subspace_with_labels_of_variance_one(label):
    task = SubspaceTask(5, 2, 6, label=label, tau=0.2, seed=4)
    b = task.sample(40_000, 1, **F64)
    across = b.x - torch.einsum("nde,ne->nd", (task.basis @ task.basis.mT)[b.cluster], b.x)
    assert abs(float(across.square().sum(1).mean()) / (4 * task.tau**2) - 1) < 0.03
    assert abs(float(b.y.var()) - 1) < 0.04


TASKS = {
    "tokens": (TokenTask(8, 6, 1, seed=5), exact.of_tokens, lambda b: b.x[:, 0]),
    "dictionary": (DictionaryTask(6, 4, seed=5), exact.of_dictionary, lambda b: b.x),
    "atoms": (DictionaryTask(6, 4, label="atoms", seed=5), exact.of_dictionary, lambda b: b.x),
    "point": (SubspaceTask(5, 2, 6, tau=0.3, seed=5), exact.of_subspaces, lambda b: b.x),
    "noise": (SubspaceTask(5, 2, 6, tau=0.3, label="noise", seed=5), exact.of_subspaces, lambda b: b.x),
}


@pytest.mark.parametrize("name", TASKS)
def test_the_best_linear_function_is_that_of_many_examples(name):
    task, of, inputs = TASKS[name]
    b = task.sample(60_000, 1, **F64)
    x, best = inputs(b), exact.best_linear(of(task))
    assert best.variance == pytest.approx(1)
    fitted = torch.linalg.lstsq(torch.cat([x, torch.ones(len(x), 1)], 1).double(), b.y).solution[:, 0]
    ours = torch.cat([best.a, torch.tensor([best.b])])
    assert (fitted - ours).norm() < 0.05 * ours.norm() + 0.05
    assert abs(float((x @ best.a + best.b - b.y[:, 0]).square().mean()) - best.error) < 0.02


@pytest.mark.parametrize("name", TASKS)
def test_no_function_beats_the_least_error_and_the_posterior_mean_attains_it(name):
    task, of, inputs = TASKS[name]
    b, parts = task.sample(30_000, 2, **F64), of(task)
    x = inputs(b)
    answers = (exact.posterior(parts, x) * (x @ parts.a.T + parts.offset)).sum(1)
    left = float(exact.left_by_all(parts, x).mean())
    assert abs(float((answers - b.y[:, 0]).square().mean()) - left) < 0.02
    assert -1e-9 < left <= exact.best_linear(parts).error


def test_components_of_gaussians_have_the_labels_of_the_task():
    task = GaussianMixture(5, 4, outputs=1, label="linear", seed=1)
    b, parts = task.sample(50, 1), exact.of_gaussians(task)
    y = (parts.a[b.cluster] * b.x).sum(1) + parts.offset[b.cluster]
    assert torch.allclose(y.float(), b.y[:, 0], atol=1e-4)


def test_networks_add_up_their_tokens():
    x = torch.randn(2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    moe, nets = TokenMoE(4, 1, 6, expert_layers=1, seeds=(1, 2)), TokenNets([4, 7, 1], (1, 2))
    one = SoftMoE(4, 1, 6, expert_layers=1, seeds=(1, 2))
    assert torch.allclose(moe(x), sum(one(x[:, :, i]) for i in range(3)), atol=1e-5)
    assert torch.allclose(nets(x), sum(nets(x[:, :, i : i + 1]) for i in range(3)), atol=1e-5)


def test_gates_of_other_kinds():
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    two = TopTwoMoE(4, 1, 6, expert_layers=1, seeds=(1, 2)).probabilities(x)
    assert ((two > 0).sum(-1) == 2).all() and torch.allclose(two.sum(-1), torch.ones(2, 9))
    moe = HeadedMoE(4, 1, 6, heads=3, seeds=(1, 2))
    by_head = (moe.router.W[0][:, 0].unflatten(1, (3, 6)) @ x.mT[:, None]).softmax(2).permute(0, 3, 1, 2)
    pi = moe.probabilities(x)
    assert torch.allclose(pi, by_head.mean(2), atol=1e-6) and torch.equal(moe.chosen(x), pi.argmax(-1))
    expected = torch.einsum("rnm,rmno->rno", pi, moe.answers(x))
    assert torch.allclose(moe(x), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenTask(4, 3, 2, output="cubic"), "output: expected one of"),
        (lambda: TokenTask(1, 3, 2), "k: expected an integer >= 2"),
        (lambda: DictionaryTask(2, 4, r=3), "r: expected at most c = 2 atoms, got 3"),
        (lambda: DictionaryTask(4, 4, sigma=0.0), "sigma: expected a finite number > 0"),
        (lambda: SubspaceTask(3, 9, 8), "t: expected at most d = 8, got 9"),
        (lambda: SubspaceTask(3, 2, 8, label="x"), "label: expected one of"),
        (lambda: HeadedMoE(4, 1, 6, heads=0), "heads: expected an integer >= 1"),
        (lambda: start_sparsity(-1.0, 3), "v: expected a finite number >= 0"),
        (
            lambda: best_frozen(torch.ones(4, 2), torch.ones(4, 2), torch.ones(4)),
            "more rows than the 6 unknowns, got 4",
        ),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_atoms_of_an_input_are_estimated_by_least_squares():
    task = DictionaryTask(6, 4, seed=5)
    b = task.sample(60_000, 1, **F64)
    present = torch.zeros(len(b.x), 6, **F64).scatter(1, b.atoms, 1.0)
    fitted = torch.linalg.lstsq(b.x, present).solution
    assert (exact.atoms_in(task) - fitted).norm() < 0.02 * fitted.norm()


def test_the_sparsity_of_a_random_router_is_that_of_many_draws():
    rng = torch.Generator().manual_seed(0)
    for v in (0.05, 0.25):
        pi = (v**0.5 * torch.randn(4_000, 32, generator=rng, **F64)).softmax(1)
        measured = average_sparsity(pi, torch.arange(4_000))
        assert start_sparsity(v, 32) == pytest.approx(measured, rel=0.004)
    assert start_sparsity(0, 7) == 7


def test_the_best_experts_of_a_frozen_router_are_found_by_least_squares():
    rng = torch.Generator().manual_seed(0)
    x, W, a = (torch.randn(*shape, generator=rng, **F64) for shape in [(4_000, 3), (4, 3), (4, 4)])
    pi = (x @ W.T).softmax(1)
    y = (pi * (x @ a[:, :3].T + a[:, 3])).sum(1)
    assert best_frozen(pi, x, y) < 1e-9
    noisy = y + 0.3 * torch.randn(len(x), generator=rng, **F64)
    assert best_frozen(pi, x, noisy) == pytest.approx(0.09, rel=0.08)


def test_a_row_of_sums_is_what_its_live_part_computes_again():
    key = dict(c=8, n=512, steps=beyond.FIRST, seed=3)
    whole, live = beyond.dictionary_row(key), beyond.dictionary_live(key)
    assert {"learned", "sparsity", "sparsity_shuffled", "sparsity_atom", "sparsity_all", "first"} == set(live)
    assert live == pytest.approx({name: whole[name] for name in live}, rel=1e-4)
    assert "sparsity_frozen" in whole
