// The race of chapter 4: products that grow like their squares, in units of the scale of the initial weights.

(() => {
  // A seeded generator (mulberry32) of uniform numbers, so that a start can be had again.
  function uniform(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let z = Math.imul(state ^ (state >>> 15), state | 1);
      z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
      return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
    };
  }

  // N standard normal products, largest first; drawn again until two are positive, since others do not race.
  function start(N, seed) {
    const next = uniform(seed);
    const normal = () => Math.sqrt(-2 * Math.log(1 - next())) * Math.cos(2 * Math.PI * next());
    for (;;) {
      const x = Array.from({ length: N }, normal).sort((a, b) => b - a);
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

  // Where each racer stands when the winner has grown by a factor: 1/x_0 - c tau.
  function standing(x, c, grown) {
    const w = winner(x, c), tau = (1 - 1 / grown) / (c[w] * x[w]);
    return x.map((xi, i) => (xi > 0 ? 1 / (1 / xi - c[i] * tau) : xi));
  }

  // The limit of each racer as the winner runs away.
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
      const b = Math.exp(u), half = Explorable.normal(b);
      const rho = Math.exp(-b * b / 2) / Math.sqrt(2 * Math.PI);
      sum += b * rho * (0.5 + half) ** (N - 2) * (Explorable.normal(b / (1 - G)) - half);
    }
    return (N * (N - 1) * sum) / 8;
  }

  // The chance that the second racer wins a drawn race: ratio x_2 > x_1, given that two of N products are positive.
  const overtakes = (N, ratio) => (ratio <= 1 ? 0 : nearTie(N, 1 - 1 / ratio) / (1 - (N + 1) / 2 ** N));

  Explorable.add("race", { formulas: { start, lead, withLead, rates, winner, standing, limits, course, race, nearTie, overtakes } });
})();
