"""Cosine routers in trainings: null directions, what holding them does, exchanged routers, turned garments."""

import math
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_book import experiments
from moe_book.experiments import cosine_language as cl
from moe_book.experiments import domains, router_steps
from moe_theory.models.language import TokenRouter, dense_width
from moe_theory.models.places import PlacesNetwork
from moe_theory.models.routers import ROUTERS, Cosine, Linear, Perturbed
from moe_theory.tasks.images import Images
from moe_theory.tasks.rotated import ANGLES, domain_task, padded, resized, rotated
from moe_theory.theory.identifiability import common_shifts, held, null_part
from moe_theory.training.fit import WARM_UP, annealed
from moe_theory.training.passages import bits_per_character

K, D = 6, 4


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def vectors(seed=0, k=K, d=D):
    return torch.randn(k, d, generator=rng(seed), dtype=torch.float64)


def router(kind, seed=0):
    return TokenRouter(kind, 8, K, D, rng(seed))


def test_a_projected_router_has_chis_parameters_and_no_normalization():
    """The same draws as the cosine router's; logits written out."""
    projected, cosine = router("projected"), router("cosine")
    assert torch.equal(projected.beta1, cosine.beta1) and torch.equal(projected.project, cosine.project)
    x = torch.randn(5, 8, generator=rng(1))
    u = x @ projected.project.T
    assert torch.allclose(projected(x), u @ projected.beta1.T / (0.07 * math.sqrt(D)), rtol=1e-5)
    cosines = torch.nn.functional.cosine_similarity(u[:, None], cosine.beta1, dim=-1)
    assert torch.allclose(cosine(x), cosines / 0.07, rtol=1e-4, atol=1e-5)
    assert torch.equal(cosine.read(x), u) and router("linear").read(x) is x


def test_a_router_may_be_given_itself():
    assert router(Perturbed(1.0)).router == Perturbed(1.0)
    assert torch.equal(router(Perturbed(0.1))(torch.ones(1, 8)), router("perturbed")(torch.ones(1, 8)))


@pytest.mark.parametrize("name", ["linear", "perturbed"])
def test_common_shifts_move_all_embeddings_by_one_vector(name):
    beta1, r = vectors(), ROUTERS[name]()
    found = common_shifts(beta1, r)
    assert found.shape == (D, K, D)
    for v in found:
        _, moved = torch.func.jvp(r.embedding, (beta1,), (v,))
        assert torch.allclose(moved, moved[:1].expand(K, D), atol=1e-12) and moved.norm() > 0.1


def test_more_vectors_than_dimensions_leave_the_sphere_no_shift():
    assert len(common_shifts(vectors(), Cosine())) == 0 and len(common_shifts(vectors(k=3), Cosine())) == 1


@pytest.mark.parametrize("name", ROUTERS)
def test_the_null_part_is_a_projection_that_gradients_lack(name):
    """Of gates' gradients nothing; twice as once; what is left is orthogonal to it."""
    r, beta1 = ROUTERS[name](), vectors().requires_grad_()
    x, target = vectors(1, k=20), vectors(2, k=20, d=K)
    ((r.feature(x) @ r.embedding(beta1).T).softmax(1) * target).sum().backward()
    assert beta1.grad.norm() > 1e-3
    assert null_part(beta1.detach(), beta1.grad, r).norm() < 1e-12 * beta1.grad.norm()
    step, b = vectors(3), beta1.detach()
    null = null_part(b, step, r)
    assert null.norm() > 0.05 and torch.allclose(null_part(b, null, r), null)
    assert abs(float((null * (step - null)).sum())) < 1e-12


@pytest.mark.parametrize("name", ("linear", "cosine", "perturbed"))
def test_the_null_part_has_the_same_bits_wherever_its_input_lies(name):
    """Least squares by `lstsq` have not: a training that holds its null directions then ends elsewhere every time."""
    r, start = ROUTERS[name](), vectors().float()
    step = 0.01 * torch.randn(start.shape, generator=torch.Generator().manual_seed(1))
    found = set()
    for offset in range(50):
        room = torch.zeros(2, start.numel() + offset)
        room[:, offset:] = torch.stack([start.flatten(), step.flatten()])
        found.add(null_part(room[0, offset:].view_as(start), room[1, offset:].view_as(step), r).numpy().tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("name", ROUTERS)
def test_holding_takes_the_null_part_from_a_step(name):
    r, start = ROUTERS[name](), vectors()
    step = 1e-4 * vectors(3)
    now = held(start, start + step, r) - start
    assert null_part(start, now, r).norm() < 1e-3 * null_part(start, step, r).norm()
    assert torch.allclose(now, step - null_part(start, step, r), atol=1e-7)
    if r.sphere:
        end = held(start, start + vectors(3), r)
        assert torch.allclose(end.norm(dim=1), start.norm(dim=1))
        assert torch.allclose(r.embedding(end), r.embedding(start + vectors(3)))


@pytest.mark.parametrize("kind", ["cosine", "perturbed"])
def test_a_held_training_is_put_back_after_each_step(kind):
    r = router(kind)
    steps = [0.1 * torch.randn(K, D, generator=rng(i)) for i in range(3)]

    def training():
        for step in steps:
            r.beta1.data = r.beta1.data + step
            yield float(step.sum())

    expected, shares = r.beta1.detach().clone(), []
    for i, loss in enumerate(cl.holding([r], training())):
        before, expected = expected, held(expected, expected + steps[i], r.router)
        assert loss == float(steps[i].sum()) and torch.allclose(r.beta1, expected, atol=1e-6)
        shares.append(cl.null_share(before, r))
    assert i == 2 and max(shares) < 0.05
    r.beta1.data = before + steps[2]
    assert cl.null_share(before, r) > 0.05


def key(arm, **how):
    return dict(arm=arm, steps=20, seed=3) | how


def test_arms_of_one_seed_start_alike():
    nets = {arm: dict(cl.build_model(key(arm)).named_parameters()) for arm in cl.ARMS}
    for arm, of in nets.items():
        for name, p in of.items():
            if ".router." not in name:
                assert torch.equal(p, nets["linear"][name]), (arm, name)
            elif arm != "linear":
                assert torch.equal(p, nets["cosine"][name]), (arm, name)


def test_exchanging_a_router_for_itself_changes_nothing():
    """Nor is anything left of the other ones; a larger tau changes more sets."""
    model = cl.build_model(key("perturbed"))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    found = cl.exchanged(model)
    own = cl.TAUS.index(0.1)
    assert found["exchanged_sets"][own] == 0 and min(found["exchanged_sets"][:own]) > 0
    assert all(a < b for a, b in pairwise(found["exchanged_sets"][own:]))
    bits = cl.language.evaluated(model, cl.text().validation[: cl.CURVE])[0]
    assert found["exchanged_bits"][own] == pytest.approx(bits, abs=1e-6)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(r.router == Perturbed(0.1) for r in cl.routers(model))
    assert cl.exchanged(cl.build_model(key("linear"))) == {"exchanged_bits": [], "exchanged_sets": []}


def test_sizes_of_scores():
    """Under the cosine router 1; under the linear one the product of the mean norms."""
    beta1, u = vectors(), vectors(1, k=9)
    assert float(cl.size(Cosine(), beta1, u)) == pytest.approx(1)
    product = beta1.norm(dim=1).mean() * u.norm(dim=1).mean()
    assert float(cl.size(Linear(), beta1, u)) == pytest.approx(float(product))


def test_the_rate_rises_and_falls_to_zero():
    """With one gradient at all steps, a step of Adam is its rate; a frozen parameter stays."""
    w, frozen = torch.zeros(1, requires_grad=True), torch.ones(1)
    steps, at = 2 * WARM_UP, []
    losses = annealed(lambda b: (w + frozen).sum(), range(steps), [w, frozen], rate=0.5, steps=steps)
    for _ in losses:
        at.append(w.item())
    taken = -torch.tensor([0.0, *at]).diff()
    for t in (0, WARM_UP // 2, WARM_UP, steps - 1):
        assert float(taken[t]) == pytest.approx(0.5 * min((t + 1) / WARM_UP, 1) * (1 - t / steps), rel=1e-3)
    assert frozen.item() == 1


@pytest.fixture
def images():
    """Two hundred random images of 8 x 8, each with its number in its corner of values."""
    x = torch.rand(200, 1, 8, 8, generator=rng())
    return Images("made", x[:150], torch.arange(150) % 10, x[150:], torch.arange(50) % 10)


def test_domains(images):
    """Five angles to train on, one to test; no image twice; the draw is one for all angles held out."""
    sizes = (20, 5, 30)
    parts = [domain_task(images, i, sizes, side=16, seed=2) for i in range(len(ANGLES))]
    for i, (train, valid, test) in enumerate(parts):
        assert [len(p.y) for p in (train, valid, test)] == [100, 25, 30]
        assert set(train.cluster.tolist()) == set(valid.cluster.tolist()) == set(range(6)) - {i}
        assert set(test.cluster.tolist()) == {i} and torch.equal(test.y, parts[0][2].y)
        assert train.x.shape == (100, 1, 16, 16)
        assert float(train.x.mean()) == pytest.approx(0, abs=1e-5) and float(train.x.std()) == pytest.approx(1)
    (of_0, *_), (of_1, *_) = parts[0], parts[1]
    assert torch.equal(of_0.y[of_0.cluster == 3], of_1.y[of_1.cluster == 3])


def test_a_domain_is_turned_by_its_angle(images):
    """Test images at an angle are, but for the scale of values, those of the first domain's test turned."""
    x = images.test_x
    for i in (0, 4):
        test = domain_task(images, i, (20, 5, 50), side=16, seed=2)[2]
        expected = resized(rotated(padded(x), ANGLES[i]), 16)
        distances = torch.cdist(_plain(test.x.double()), _plain(expected.double()))
        assert distances.min(1).values.max() < 1e-3 < distances.max()


def _plain(x):
    """Images as unit vectors without their mean: free of a common scale."""
    return torch.nn.functional.normalize(x.flatten(1) - x.flatten(1).mean(1, keepdim=True), dim=1)


def test_bad_domains(images):
    with pytest.raises(ValueError, match="held_out: expected the number of one of 6 angles, got 6"):
        domain_task(images, 6, (1, 1, 1))
    with pytest.raises(ValueError, match="held_out: expected an integer >= 0, got -1"):
        domain_task(images, -1, (1, 1, 1))
    with pytest.raises(ValueError, match="n_train: expected at most the 150 images of made, got 156"):
        domain_task(images, 0, (25, 1, 1))


def test_a_network_of_places():
    """Tokens of 16 places; of one seed all but the layer is alike; equal operations."""
    how = dict(d=D, width=8, seed=4)
    dense = PlacesNetwork(16, 10, D, dense_width(8, K, 2), seed=4)
    mixture = PlacesNetwork(16, 10, **how, experts=K)
    x = torch.randn(3, 1, 16, 16, generator=rng())
    assert dense(x).shape == (3, 10) and dense.tokens(x).shape == (3, 16, D)
    assert torch.equal(dense.tokens(x), mixture.tokens(x)) and torch.equal(dense.answer.W, mixture.answer.W)
    counts = []
    for net in (dense, mixture):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.feed(torch.randn(48, D))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_place_sees_a_patch():
    """A pixel in a corner changes the tokens of the places around it only."""
    net, x = PlacesNetwork(16, 10, D, 8, experts=K, seed=1), torch.randn(1, 1, 16, 16, generator=rng())
    other = x.clone()
    other[..., 0, 0] += 5
    moved = (net.tokens(other) - net.tokens(x)).abs().sum(-1)[0].view(4, 4)
    assert moved[0, 0] > 0 and moved[2:].max() == 0 == moved[:, 2:].max()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"side": 15}, "side: expected a multiple of 4, got 15"),
        ({"side": 2}, "side: expected an integer >= 4, got 2"),
        ({"d": 5}, "d: expected an even number, got 5"),
        ({"experts": 2, "k": 3}, "k: expected at most M = 2 experts, got 3"),
        ({"experts": 4, "kind": "round"}, "router: expected one of"),
    ],
)
def test_bad_networks(bad, message):
    with pytest.raises(ValueError, match=message):
        PlacesNetwork(**{"side": 16, "outputs": 10, "d": 4, "width": 8} | bad)


def test_a_domain_row_begins_as_live_does(garments):
    of = dict(model="cosine, held", held_out=2, steps=domains.FIRST, seed=9)
    found = domains.row(of)
    assert domains.live(of) == {"first": found["first"]}
    assert found["first"] == found["last"] and 0 < found["spread"] < math.log2(domains.EXPERTS)
    radius = domains.build_network(of).feed.router.beta1.norm(dim=1).mean()
    assert found["radius"] == pytest.approx(float(radius), rel=1e-5)


@pytest.mark.parametrize("arm", ["projected", "perturbed, held"])
def test_stored_language_rows_begin_as_they_are_computed(arm):
    if cl.text().digest != experiments.load("cosine_language").digest.iloc[0]:
        pytest.skip("the text of the rows is not at hand")
    stored, now = experiments.recompute("cosine_language", arm=arm, seed=7)["first"]
    assert now == pytest.approx(stored, rel=1e-3)  # rounding has grown over the first batches


@pytest.mark.parametrize("model", domains.MODELS)
def test_stored_domain_rows_begin_as_they_are_computed(model, garments):
    stored, now = experiments.recompute("domains", model=model, held_out=5, seed=4)["first"]
    assert now == pytest.approx(stored, rel=5e-4)


@pytest.mark.slow
def test_a_stored_domain_row_ends_as_it_is_computed(garments):
    """Within four deviations of what a start off by a millionth makes of it: other processors round otherwise."""
    of = dict(model="perturbed", held_out=1, steps=domains.STEPS, seed=2)
    rows = experiments.load("domains").to_dict("records")
    (stored,) = (row for row in rows if all(row[name] == value for name, value in of.items()))
    found = domains.row(of)
    assert found["test"] == pytest.approx(stored["test"], abs=8)
    assert found["valid"] == pytest.approx(stored["valid"], abs=4)
    assert found["radius"] == pytest.approx(stored["radius"], rel=0.02)


@pytest.mark.parametrize("arm", ["linear", "cosine", "perturbed"])
def test_gradients_are_those_of_the_loss_and_lack_null_directions(arm):
    """The derivative along a move of the first block's vectors, by a difference quotient."""
    model = cl.build_model(key(arm)).double()
    (first, *_), batch = cl.routers(model), next(router_steps.batches(1, 3))
    of = router_steps.gradients(model, batch)
    assert len(of) == 2 and router_steps.share(first, of[0]) < 1e-20
    move = torch.randn(first.beta1.shape, generator=rng(), dtype=torch.float64)
    losses = []
    for h in (1e-5, -1e-5):
        first.beta1.data += h * move
        with torch.no_grad():
            losses.append(float(bits_per_character(model(batch[:, :-1]), batch[:, 1:])))
        first.beta1.data -= h * move
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(float((of[0] * move).sum()), rel=1e-4)


def test_the_share_of_a_step_along_the_radii_is_one():
    first = cl.routers(cl.build_model(key("cosine")))[0]
    assert router_steps.share(first, 0.3 * first.beta1.detach()) == pytest.approx(1, abs=1e-6)
    assert router_steps.adam_share("cosine", 3, steps=3) > 1e-3 > router_steps.adam_share("cosine, held", 3, steps=3)


@pytest.mark.parametrize(("optimizer", "power"), [(torch.optim.SGD, 2), (torch.optim.Adam, 1)])
def test_longer_vectors_turn_less(optimizer, power):
    ratio = router_steps.slowed(optimizer, 3)
    assert torch.allclose(ratio, torch.full_like(ratio, 0.5**power), rtol=0.01)


def test_momentum_pushes_outward():
    """Without momentum a step is at a right angle to the vector, up to what Adam's scaling of coordinates makes."""
    without, much = (router_steps.outward(b, 3, steps=40) for b in (0.0, 0.9))
    assert abs(without) < 0.5 < much < 1


def test_what_a_row_began_with_is_taken_again(monkeypatch):
    """First losses of any router; of held ones bits and norms on the way, which are those of the start."""
    monkeypatch.setattr(cl, "FIRST", 2)
    free, of_held = (cl.begun(key(arm) | {"steps": 2 * cl.POINTS}) for arm in ("cosine", "cosine, held"))
    assert len(free) == 1 and len(of_held) == 4 and free[0] == pytest.approx(of_held[0], rel=1e-2)
    assert of_held[2:] == pytest.approx(cl.course(cl.build_model(key("cosine")))["radius"], rel=1e-5)


def test_a_whole_training_is_taken_again(garments):
    """Off by nothing it is the row; off by something it is another."""
    of = dict(model="perturbed", held_out=1, steps=5, seed=0)
    row, same, other = domains.row(of), domains.ended(of, 0.0), domains.ended(of, 1.0)
    assert same == pytest.approx({name: row[name] for name in same}, abs=1e-6) and other != same
