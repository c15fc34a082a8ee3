// The race of chapter 4: products that grow like their squares, in units of the scale of the initial weights.

(() => {
  // N standard normal products, largest first; drawn again until two are positive, since others do not race.
  function start(N, seed) {
    const next = Explorable.normals(seed);
    for (;;) {
      const x = Array.from({ length: N }, next).sort((a, b) => b - a);
      if (x[1] > 0) return x;
    }
  }

  const lead = (x) => x[0] / x[1] - 1;
  const withLead = (x, G) => [(1 + G) * x[1], ...x.slice(1)];
  const rates = (N, ratio) => Array.from({ length: N }, (_, i) => (i === 1 ? ratio : 1));

  // Which racer wins a long race: 1/x falls at the speed c, so the first to reach 0 has the largest c x.
  function winner(x, c) {
    const pace = x.map((xi, i) => c[i] * xi);
    return pace.indexOf(Math.max(...pace));
  }

  // Where each product stands when the winner has grown by a factor: 1/x = 1/x_0 - c tau.
  function standing(x, c, grown) {
    const w = winner(x, c), tau = (1 - 1 / grown) / (c[w] * x[w]);
    return x.map((xi, i) => xi / (1 - c[i] * xi * tau));
  }

  // The limit of each product as the winner runs away; infinite for one that runs away with it.
  const limits = (x, c) => standing(x, c, Infinity);

  const distance = (x, y) => Math.hypot(...x.map((xi, i) => xi - y[i]));

  // The race up to a path length, at `steps` points that are evenly spaced in the logarithm of the winner's growth.
  function course(x, c, path, steps) {
    const farthest = Math.log(1 + path / x[winner(x, c)]);
    const points = [{ length: 0, grown: 1, x }];
    for (let i = 1; i < steps; i += 1) {
      const grown = Math.exp((farthest * i) / (steps - 1)), now = standing(x, c, grown), last = points[i - 1];
      points.push({ length: last.length + distance(now, last.x), grown, x: now });
    }
    return points;
  }

  // Where the racers stand after a path length: the last point of the course that is not beyond it.
  function race(x, c, path, steps) {
    return course(x, c, path, steps).filter(({ length }) => length <= path).at(-1).x;
  }

  // The chance that the second largest of N normals is positive and at least 1 - G times the largest:
  // N (N-1) int_0^inf rho(b) Phi(b)^(N-2) (Phi(b / (1-G)) - Phi(b)) db, by the trapezoidal rule in log b.
  function nearTie(N, G) {
    let sum = 0;
    for (let u = -15; u < 2.3; u += 1 / 8) {
      const b = Math.exp(u), half = Explorable.mass(b);
      const rho = Math.exp(-b * b / 2) / Math.sqrt(2 * Math.PI);
      sum += b * rho * (0.5 + half) ** (N - 2) * (Explorable.mass(b / (1 - G)) - half);
    }
    return (N * (N - 1) * sum) / 8;
  }

  // The chance that the second racer wins a drawn race: ratio x_2 > x_1, given that two of N products are positive.
  const overtakes = (N, ratio) => (ratio <= 1 ? 0 : nearTie(N, 1 - 1 / ratio) / (1 - (N + 1) / 2 ** N));

  const EDGES = { path: [-1, 3], product: [-1.5, 3.1] };  // of the picture, powers of ten
  const LEADS = [-3, 1.3], LEAD_STEP = 0.01;  // powers of ten, of which a draw may lie outside

  // The starts of a state: as drawn while the handle of the lead stands where the draw put it.
  function starts({ racers, seed, lead: exponent }) {
    const x = start(racers, seed), drawn = Math.min(LEADS[1], Math.max(LEADS[0], Math.log10(lead(x))));
    return Math.abs(drawn - exponent) <= LEAD_STEP / 2 ? x : withLead(x, 10 ** exponent);
  }

  const setting = ({ racers, ratio }) => `${racers} ${ratio}`;

  // New draws, counted as long as neither the number of racers nor the rates change.
  function play(state, rounds) {
    const { racers, ratio, drawn = state.seed } = state, c = rates(racers, 2 ** ratio);
    const before = state.counted === setting(state) ? state : { played: 0, lost: 0 };
    const seeds = Array.from({ length: rounds }, (_, i) => drawn + 1 + i);
    const lost = seeds.filter((seed) => winner(start(racers, seed), c) === 1).length;
    return { drawn: seeds.at(-1), counted: setting(state), played: before.played + rounds, lost: before.lost + lost };
  }

  // One draw, which the picture shows.
  function playOne(state) {
    const counts = play(state, 1);
    return { ...counts, seed: counts.drawn, lead: Math.log10(lead(start(state.racers, counts.drawn))) };
  }

  // Where the racers stand at a path length, between two points of the course: on the chord from the one before.
  function at(points, x, c, path) {
    const after = points.findIndex(({ length }) => length > path), [p, q] = points.slice(after - 1, after + 1);
    let [low, high] = [p.grown, q.grown];
    for (let i = 0; i < 40; i += 1) {
      const middle = (low + high) / 2;
      if (p.length + distance(standing(x, c, middle), p.x) > path) high = middle;
      else low = middle;
    }
    return standing(x, c, low);
  }

  const seen = Explorable.remembered((state) => {
    const x = starts(state), c = rates(state.racers, 2 ** state.ratio), points = course(x, c, 2000, 400);
    return { x, c, points, now: at(points, x, c, 10 ** state.path), winner: winner(x, c), limits: limits(x, c) };
  });

  const fold = (factor) => `${Explorable.number(factor, factor < 10 ? 2 : 0)}-fold`;
  const share = (part) => `${Explorable.number(100 * part, part && part < 0.1 ? 1 : 0)} %`;
  const units = (value) => (value < 1 ? value.toPrecision(2) : Explorable.number(value, 1));
  const log = Math.log10;

  function draw(kit, state) {
    const { x, points, now, winner: first, limits: ends } = seen(state), length = 10 ** state.path;
    const powers = [-1, 0, 1, 2, 3].map((power) => [power, `${10 ** power}`]);
    const plot = kit.plot(0, {
      x: EDGES.path, y: EDGES.product, xticks: powers, yticks: powers,
      xlabel: "length of the path (in σ₀)", ylabel: "inner product (in σ₀)",
      keys: [
        ["measured", "racer 1, the initial leader"], ["bound", "racer 2, second"], ["reference", "others", "thin"],
      ],
    });
    const along = (i, keep) => points.filter((p) => p.length > 0 && keep(p)).map((p) => [log(p.length), log(p.x[i])]);
    const curve = (i, colour, style) => {
      const from = [EDGES.path[0], log(x[i])], to = [state.path, log(now[i])];
      plot.line([from, ...along(i, (p) => p.length < length), to], colour, style);
    };
    x.forEach((xi, i) => { if (i > 1 && xi > 0) curve(i, "reference", "thin"); });
    const loser = 1 - first, limit = log(ends[loser]);
    const losing = loser ? "bound" : "measured";
    if (limit < Infinity) plot.line(EDGES.path.map((edge) => [edge, limit]), losing, "thin dashed");
    [[1, "bound"], [0, "measured"]].forEach(([i, colour]) => {
      curve(i, colour);
      plot.line([[state.path, log(now[i])], ...along(i, (p) => p.length > length)], colour, "thin dashed");
      plot.dot(state.path, log(now[i]), colour);
    });
    // The name of the limit stands at the end of its line where no racer passes.
    const [edge, anchor] = limit > 2 ? [EDGES.path[0], "start"] : [EDGES.path[1], "end"];
    if (limit < EDGES.product[1] - 0.4) plot.text(edge, limit, "limit", anchor, [limit > 2 ? 4 : -4, -6]);
  }

  function readout(state) {
    const { x, now, winner: first, limits: ends } = seen(state), loser = 1 - first;
    const grown = [0, 1].map((i) => fold(now[i] / x[i])), end = ends[loser];
    const outcome = end < Infinity
      ? `racer ${first + 1} wins, and racer ${loser + 1} stops at ${units(end)} σ₀ (${fold(end / x[loser])})`
      : "racers 1 and 2 run away together";
    const racing = x.filter((xi) => xi > 0).length;
    const { played, lost } = state.counted === setting(state) ? state : { played: 0, lost: 0 };
    return `Racer 1 has grown ${grown[0]}, and racer 2 ${grown[1]}. In a long race ${outcome}. `
      + `${racing} of ${state.racers} products are positive and race.`
      + (played ? ` The leader lost ${lost} of ${played} draws; by theory it loses `
        + `${share(overtakes(state.racers, 2 ** state.ratio))}.` : "");
  }

  const percent = (part) => `${part < 0.01 ? (100 * part).toPrecision(2) : Explorable.number(100 * part, part < 1 ? 1 : 0)} %`;

  Explorable.add("race", {
    title: "Who wins the race?",
    says: "Each product z grows by rate · z² in time. The path is how far the expert has moved. Raise the rate of racer "
      + "2 until it wins (possible at leads below 100 %). Keep that rate and press 100 new draws: how often does the leader "
      + "lose?",
    shows: "Inner products against the length of the path, on logarithmic axes; dashed, later ones and the limit.",
    handles: [
      { key: "lead", label: "Initial lead of racer 1", min: LEADS[0], max: LEADS[1], step: LEAD_STEP, value: -0.5,
        text: (_, state) => percent(lead(starts(state))) },
      { key: "ratio", label: "Rate of racer 2 / other rates", min: -1, max: 1, step: 0.01, value: 0,
        text: (exponent) => Explorable.number(2 ** exponent, 3) },
      { key: "racers", label: "Number of products", min: 2, max: 16, step: 1, value: 8 },
      { key: "path", label: "Length of the path", min: -0.5, max: 3, step: 0.01, value: 2.5,
        text: (exponent) => `${Explorable.number(10 ** exponent, exponent < 1 ? 1 : 0)} σ₀` },
      { label: "New draw", press: playOne },
      { label: "100 new draws", press: (state) => play(state, 100) },
    ],
    state: { seed: 1, drawn: 1, counted: "", played: 0, lost: 0 },
    height: 400,
    narrow: [300],
    draw,
    readout,
    source: ["by theory", "appendix/04_details.html#thm-explore-margin"],
    formulas: { start, lead, withLead, rates, winner, standing, limits, course, race, nearTie, overtakes, play },
  });
})();
