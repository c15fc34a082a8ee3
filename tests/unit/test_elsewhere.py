"""Code that picks a device, run on one on which mixing is an error: see `elsewhere`."""

import ast
import operator
import sys
from functools import partial

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from elsewhere import DEVICE, Elsewhere, MixedDevices, There

from moe_book import devices, figures
from moe_book.experiments import experiment, run
from moe_book.experiments.catalogue import entries
from moe_book.notebooks import NOTEBOOKS, notebooks, page
from moe_book.sabotage.slicing import needed
from moe_theory import training
from moe_theory.diagnose import compare_routers, diagnose, diagnose_router
from moe_theory.measure.dispatch import dispatch_entropy
from moe_theory.measure.voronoi import voronoi_loss
from moe_theory.models.mixture import MixingMeasure, draw_measure, jacobian, regression_function
from moe_theory.models.routers import ROUTERS, CosineRouter, LinearRouter, PerturbedCosineRouter
from moe_theory.models.rules import softmax_topk, topk_softmax
from moe_theory.tasks.patches import PatchTask
from moe_theory.theory import concentration, gates, kept_sets, single_expert, smoothing, threshold
from moe_theory.theory import plackett_luce as pl
from moe_theory.theory import router_gradient as rg
from moe_theory.training import train_patch_moe, train_single_expert
from moe_theory.training.least_squares import least_squares
from moe_theory.training.sgd import stochastic_descents

# --- the device itself --------------------------------------------------------------------------


@pytest.fixture
def tensors():
    """A matrix elsewhere, one on the CPU, and a number there."""
    with Elsewhere():
        yield torch.eye(3, device=DEVICE), torch.eye(3), torch.tensor(2.0)


def put(into, at, values):
    into[at] = values
    return into


MIXED = {
    "sum": operator.add,
    "sum, the other way round": lambda a, c: c + a,
    "number elsewhere": lambda a, c: a.sum() + c,
    "comparison": torch.gt,
    "choice": lambda a, c: torch.where(c > 0, a, a),
    "product": operator.matmul,
    "product with a vector": lambda a, c: a @ c[0],
    "einsum": lambda a, c: torch.einsum("ij,jk->ik", a, c),
    "linear layer": torch.nn.functional.linear,
    "cat": lambda a, c: torch.cat([a, c]),
    "stack": lambda a, c: torch.stack([c, a]),
    "in place": lambda a, c: a.add_(c),
    "in place, on the CPU": lambda a, c: c.add_(a),
    "in place, on a number of the CPU": lambda a, c: c.sum().add_(a.sum()),
    "into a tensor of the CPU": lambda a, c: torch.add(a, a, out=c),
    "values put at indices": lambda a, c: put(a, torch.tensor([0, 2]), c[:2]),
    "values put on the CPU": lambda a, c: put(c, torch.tensor([0, 2]), a[:2]),
    "indices elsewhere": lambda a, c: c[a[0].long()],
    "mask elsewhere": lambda a, c: c[a > 0],
    "mask of the CPU, filled": lambda a, c: a.masked_fill(c > 0, 1.0),
    "rows added": lambda a, c: a.index_add_(0, torch.tensor([0]), a[:1]),
    "gather": lambda a, c: a.gather(0, c.long()),
    "linear system": torch.linalg.solve,
    "search": lambda a, c: torch.searchsorted(a[0], c[0]),
    "equality": torch.equal,
    "draws": lambda a, c: torch.rand(3, generator=torch.Generator(), device=a.device),
    "draws in place": lambda a, c: a.normal_(generator=torch.Generator()),
    "under vmap": lambda a, c: torch.func.vmap(lambda row: row @ c)(a),
    "under grad": lambda a, c: torch.func.grad(lambda x: (x * c).sum())(a),
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_mixture_is_refused(tensors, kind):
    a, c, _ = tensors
    with pytest.raises(MixedDevices):
        MIXED[kind](a, c)


def test_numpy_sees_only_the_cpu(tensors):
    for see in (np.asarray, lambda t: t.numpy()):
        with pytest.raises(TypeError, match=r"Tensor\.cpu"):
            see(tensors[0])


ALLOWED = {
    "with its own kind": lambda a, c, z: a @ a + torch.cat([a, a])[:3],
    "copied there": lambda a, c, z: a + c.to(a.device) + c.to(a),
    "copied into it": lambda a, c, z: torch.zeros_like(a).copy_(c),
    "a row set": lambda a, c, z: put(a, 0, c[0]),
    "Python's number": lambda a, c, z: put(2 * a - 1, (0, 0), 7),
    "a number of the CPU": lambda a, c, z: torch.maximum(a * z, z) ** z,
    "that number put and filled": lambda a, c, z: put(a.masked_fill(a > 0, z), torch.tensor([1]), z),
    "indices of the CPU": lambda a, c, z: a[torch.tensor([2, 0])],
    "a list of indices": lambda a, c, z: put(a[:, [0, 2]], [1], 5),
    "mask of the CPU": lambda a, c, z: a[c > 0],
    "made beside it": lambda a, c, z: a + a.new_tensor([1.0, 2.0, 3.0]) + a.new_zeros(3) + torch.ones_like(a),
    "made there": lambda a, c, z: a * torch.arange(3, device=a.device) + torch.tensor([1, 2, 3], device=a.device),
    "a derivative": lambda a, c, z: torch.func.hessian(lambda x: (x**3).sum())(a[0]),
    "a shape changed in place": lambda a, c, z: (a[0] @ a) + a.clone().unsqueeze_(0).squeeze_(0),
    "factors": lambda a, c, z: torch.linalg.svd(a + 1).S,
}


@pytest.mark.parametrize("kind", ALLOWED)
def test_what_does_not_mix_gives_the_same_numbers(tensors, kind):
    a, c, z = tensors
    found = ALLOWED[kind](a.clone(), c.clone(), z)
    assert isinstance(found, There) and found.device == DEVICE
    torch.testing.assert_close(found.cpu(), ALLOWED[kind](c.clone(), c.clone(), z))


def test_copies_come_back_and_training_goes_on_there(tensors):
    a, c, _ = tensors
    assert type(a.cpu()) is torch.Tensor and (a.cpu() + c).sum() == 6 and a.tolist() == c.tolist()
    layer = torch.nn.Linear(3, 2).to(a.device)
    before = layer.weight.detach().cpu().clone()
    optimizer = torch.optim.Adam(layer.parameters(), 0.1)
    layer(a).square().sum().backward()
    optimizer.step()
    assert layer.weight.device == layer.weight.grad.device == DEVICE and not torch.equal(layer.weight.cpu(), before)


# --- the package --------------------------------------------------------------------------------


def real(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


SMALL = PatchTask(K=3, d=8)
TRAIN, TEST = SMALL.sample(60, 1), SMALL.sample(40, 2)
SHORT = dict(experts=3, filters=2, steps=4, record_every=2)


def trained(to, **how):
    (run,) = train_patch_moe(to(TRAIN), to(TEST), **SHORT, **how)
    return [run.test_accuracy, run.history[-1]["loss"], run.history[-1]["dispatch"], *run.parameters.values()]


def single(to):
    model, history = train_single_expert(to(TRAIN), to(TEST), activation="relu", filters=4, epochs=3)
    return [*model.parameters(), *(v for entry in history for v in entry.values() if isinstance(v, int | float))]


MEASURE, TRUTH = draw_measure(3, 2, 1), draw_measure(2, 2, 0, 0.5)


def moved(G, to):
    return MixingMeasure(to(G.beta0), to(G.beta1), to(G.eta))


def parts(measures):
    return [part for G in measures for part in (G.beta0, G.beta1, G.eta)]


def descended(to, name):
    """Least squares and stochastic descents, from one start each on two data sets."""
    x, start, router = to(real(2, 40, 2)), [moved(TRUTH, to)] * 2, ROUTERS[name]()
    fits = least_squares(x, x[..., 0], start, router, "tanh", steps=5)
    ends = stochastic_descents(x, x[..., 0], start, router, "tanh", epochs=2, batch=10, seeds=[0, 1])
    return [*parts(fits.G), fits.sse, *parts(ends)]


def routed(to):
    """Logits of each router as a layer, and their slope in its weights."""
    found = []
    for kind in (CosineRouter, PerturbedCosineRouter, LinearRouter):
        layer = kind(4, 3)
        for weight in layer.parameters():
            weight.data += 0.1
        x = to(real(5, 2, 4).float())
        layer = layer.to(x.device)
        logits = layer(x if kind is LinearRouter else x[:, 0])
        logits.square().sum().backward()
        found += [logits, *(weight.grad for weight in layer.parameters())]
    return found


def read_off(to):
    """What `diagnose_router` finds in logits, loads as numbers."""
    x, W = real(200, 3), real(6, 3)
    report = diagnose_router(to(x @ W.T), k=2, labels={"sign": to((x[:, 0] > 0).long())}, x=to(x), W=to(W))
    router = report.routers["router"]
    return [router.loads, router.undecided, router.changed, router.flips, compare_routers(to(W), to(W + 1)).centred]


CALLS = {
    "Algorithm 1": trained,
    "Algorithm 1, balanced, same start": lambda to: trained(to, balance=0.1, same_start=True, normalized=False),
    "Algorithm 1 as released": lambda to: trained(to, variant="released", balance=0.1),
    "one expert": single,
    "routing probabilities": lambda to: [
        smoothing.route_probabilities(to(real(5, 4)), noise, 0.7) for noise in ("uniform", "gaussian")
    ],
    "their slopes": lambda to: [smoothing.local_lipschitz(to(real(5, 4)), noise) for noise in ("uniform", "gaussian")],
    "kept": lambda to: kept_sets.keep_probability(to(real(5, 4)), 2, scale=0.5),
    "jumps": lambda to: gates.jumps_at_ties(2, softmax_topk, to(real(5, 4)), to(real(5, 4, 2))),
    "inclusion": lambda to: [
        f(to(real(5)), 2) for f in (pl.inclusion_by_orders, pl.inclusion_by_sets, pl.inclusion_by_quadrature)
    ],
    "sampled output": lambda to: pl.expected_output(to(real(5)), to(real(5, 2)), 2, "selected"),
    "boundary": lambda to: rg.boundary_term(
        to(real(3, 2)), 1, rg.affine_loss(to(real(3, 2)), to(real(3)), softmax_topk)
    ),
    "mean gradient": lambda to: rg.mean_gradient(
        to(real(3, 2)), 1, rg.affine_loss(to(real(3, 2)), to(real(3)), softmax_topk)
    ),
    "threshold": lambda to: [threshold.threshold_risk(to(real(1)[0]), softmax_topk)],
    "threshold under noise": lambda to: threshold.noisy_threshold_risk(to(real(1)[0]), 0.3),
    "margins": lambda to: single_expert.witness_margins(to(real(3).abs()), to(real(3).abs())),
    "rules": lambda to: [rule(to(real(5, 4)), 2) for rule in (softmax_topk, topk_softmax)],
    "regression functions": lambda to: [
        f(moved(TRUTH, to), to(real(9, 2)), ROUTERS[name](), "relu")
        for f in (regression_function, jacobian)
        for name in ROUTERS
    ],
    "Voronoi losses": lambda to: [
        voronoi_loss(moved(MEASURE, to), moved(TRUTH, to), kind) for kind in ("L1r", "L2", "L3")
    ],
    **{f"descents, {name}": partial(descended, name=name) for name in ROUTERS},
    "layers": routed,
    "dispatch entropy": lambda to: [dispatch_entropy(*(to(torch.tensor(v)) for v in ([0, 1, 2, 0], [0, 1, 1, 0])))],
    "diagnosis": read_off,
    "sums": lambda to: list(concentration.signal_sums(to(SMALL.sample(50, 0, torch.float64)), 3).values()),
}


def numbers(found):
    """What a function gives, as a flat list of numbers."""
    if isinstance(found, list | tuple):
        return [n for part in found for n in numbers(part)]
    return (found.detach().cpu().double() if isinstance(found, torch.Tensor) else np.asarray(found)).ravel().tolist()


@pytest.mark.parametrize("name", CALLS)
def test_the_package_does_not_mix(name):
    expected = numbers(CALLS[name](lambda x: x))
    with Elsewhere():
        found = numbers(CALLS[name](lambda x: x.to(DEVICE)))
    assert len(found) and found == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)


@pytest.mark.slow
def test_a_model_is_diagnosed_where_it_lies(monkeypatch):
    """With the library's loop over experts: its kernel for all at once cannot be asked here."""
    monkeypatch.setattr("moe_theory.diagnose.model._real_weights", lambda model: None)  # this `meta` has numbers
    pytest.importorskip("transformers", minversion="5.6")
    from moe_theory.diagnose import tiny

    model, (batch, *_) = tiny.tiny("Mixtral"), tiny.batches("Mixtral", 1)
    model.set_experts_implementation("eager")
    expected = diagnose(model, [batch])
    with Elsewhere():
        found = diagnose(model.to(DEVICE), [{name: values.to(DEVICE) for name, values in batch.items()}])
    pd.testing.assert_frame_equal(found.layers(), expected.layers(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.get("gpu")])
def test_rows_that_can_be_computed_on_a_gpu_do_not_mix(name, monkeypatch):
    """Each of its smoke rows, but for the last digit: on this device sums may have another order."""
    of, made = experiment(name), There.made
    module = sys.modules[of.row.__module__]
    for key in of.smoke:
        expected = of.row(key)
        with Elsewhere(), monkeypatch.context() as patch:
            patch.setattr(module, "row_device", lambda: DEVICE)
            found = of.row(key)
        assert found.keys() == expected.keys()
        for column, value in expected.items():
            if not isinstance(value, str):
                np.testing.assert_allclose(found[column], value, rtol=1e-4, err_msg=column)
    assert There.made > made + 100, "little was computed there"


@pytest.mark.parametrize("there", [False, True])
def test_the_device_is_what_is_asked_for(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    assert devices.pick_device().type == ("cuda" if there else "cpu") and devices.row_device().type == "cpu"
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    for name in devices.NAMES:
        monkeypatch.setenv(devices.VARIABLE, name)
        if name == "cpu" or there:
            assert devices.pick_device().type == name
    refusal = "expected 'cpu' for voronoi_lse, which .* got 'cuda'" if there else "expected a GPU .*, found none"
    with pytest.raises(ValueError, match=f"device: {refusal}"):
        run("voronoi_lse", profile="smoke", device="cuda")
    monkeypatch.setenv(devices.VARIABLE, "tpu")
    with pytest.raises(ValueError, match="MOE_BOOK_DEVICE: expected one of .*cuda.*got 'tpu'"):
        devices.pick_device()


# --- the chapters that pick a device ------------------------------------------------------------

PICK = "device = pick_device()"
PICKING = [page(p) for p in notebooks() if PICK in p.read_text()]


def code(stem: str) -> list[str]:
    return [c.source for c in nbformat.read(NOTEBOOKS / f"{stem}.ipynb", 4).cells if c.cell_type == "code"]


def on_the_device(cells: list[str]) -> list[str]:
    """The cells that move something there, those that read what was moved, and what these need; the others empty."""
    read = [{n.id for n in ast.walk(ast.parse(c)) if isinstance(n, ast.Name)} for c in cells]
    there = {i for i, c in enumerate(cells) if "(device)" in c}
    of_them = set()
    for i in there:
        for line in ast.parse(cells[i]).body:
            if isinstance(line, ast.Assign) and "(device)" in ast.unparse(line):
                of_them |= {n.id for target in line.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    there |= {i for i in range(min(there), len(cells)) if read[i] & of_them}
    run = set().union(*(needed(cells, i) for i in there))
    return [c if i in run else "" for i, c in enumerate(cells)]


def test_the_chapters_that_pick_a_device():
    assert [stem[:2] for stem in PICKING] == ["01", "04"]


@pytest.mark.slow
@pytest.mark.parametrize("stem", PICKING)
def test_a_chapter_does_not_mix(stem, monkeypatch):
    """All of it that computes there, but of each training of many experts four steps only."""

    def short(train, test, *, steps, record_every=1, **how):
        return train_patch_moe(train, test, steps=min(steps, 4), record_every=2, **how)

    monkeypatch.setattr(training, "train_patch_moe", short)
    monkeypatch.setattr(figures, "show", lambda figure, caption, alt: plt.close(figure))
    monkeypatch.setattr(figures, "table", lambda frame, caption, digits=2: None)
    names, before = {}, There.made
    with Elsewhere():
        for cell in on_the_device(code(stem)):
            exec(cell.replace(PICK, f'device = "{DEVICE}"'), names)
    assert There.made > before + 100, "little was computed there"
