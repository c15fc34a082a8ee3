// The phase plane of chapter 11: norm of the router and its angle to the line through two clusters in the plane.

(() => {
  // Quadrature for one coordinate of N(0, sigma^2 I_2) truncated to the ball of radius r: E f is sum p f(tau).
  // With tau = r cos(phi) the density is smooth and periodic in phi; without truncation it falls fast at both ends.
  // In both cases the sum over equally spaced points converges faster than any power of their number.
  function law(r, sigma, nodes) {
    const at = Array.from({ length: nodes }, (_, k) => (k + 0.5) / nodes);
    const tau = at.map(r === Infinity ? (x) => 8.5 * sigma * (2 * x - 1) : (x) => r * Math.cos(Math.PI * x));
    const slice = (x) => Math.sin(Math.PI * x) * Explorable.mass((r * Math.sin(Math.PI * x)) / sigma);
    const p = at.map((x, k) => Math.exp(-(tau[k] ** 2) / (2 * sigma ** 2)) * (r === Infinity ? 1 : slice(x)));
    const total = p.reduce((sum, weight) => sum + weight);
    return { tau: Float64Array.from(tau), p: Float64Array.from(p, (weight) => weight / total) };
  }

  // The law with enough nodes for a router of some length, to 1e-10: tanh has its poles at the distance pi / length.
  function noise(r, sigma) {
    const laws = {};
    return (length) => {
      const needed = r === Infinity ? 28 * sigma * length : 12 / Math.asinh(Math.PI / (r * length));
      const nodes = Math.max(64, 2 ** Math.ceil(Math.log2(needed)));
      laws[nodes] ??= law(r, sigma, nodes);
      return laws[nodes];
    };
  }

  // -dL/dw = a w + b z with the experts at their optimum rho v: b = 4 rho E psi, a = 4 rho E[tau psi] / |w|,
  // psi = q' (1 - rho q), q = tanh(h / 2), h = m + |w| tau. With 1 - q for q nothing cancels where q is near 1.
  function drift(lawFor, m, s) {
    const length = Math.hypot(m, s), { tau, p } = lawFor(length), N = p.length;
    const off = new Float64Array(N), slope = new Float64Array(N);
    let mean = 0, square = 0, mixed = 0, psi = 0, pull = 0;
    for (let k = 0; k < N; k += 1) {
      const h = m + length * tau[k], e = Math.exp(-Math.abs(h)), small = e / (1 + e), large = 1 / (1 + e);
      const q = Math.sign(h) * (large - small);
      off[k] = 2 * (h > 0 ? small : large);
      slope[k] = 2 * small * large;
      mean += p[k] * q;
      square += p[k] * q * q;
      mixed += p[k] * q * off[k];
    }
    for (let k = 0; k < N; k += 1) {
      const weight = p[k] * slope[k] * (off[k] * mean - mixed);
      psi += weight;
      pull += weight * tau[k];
    }
    const rho = mean / square;
    return { a: (4 * rho * pull) / square / length, b: (4 * rho * psi) / square, rho };
  }

  const polar = ({ m, s }) => ({ norm: Math.hypot(m, s), degrees: (Math.atan2(Math.abs(s), m) * 180) / Math.PI });
  const parts = (norm, degrees) => {
    const theta = (degrees * Math.PI) / 180;
    return { m: norm * Math.cos(theta), s: norm * Math.sin(theta) };
  };

  // Speed of the norm along the flow: a |w| + b cos(theta).
  function growth(lawFor, norm, degrees) {
    const { m, s } = parts(norm, degrees), { a, b } = drift(lawFor, m, s);
    return a * norm + (b * m) / norm;
  }

  // Without truncation the norm grows up to here: |w| = 2 cos(theta) / sigma^2.
  const edge = (sigma, degrees) => (2 * Math.cos((degrees * Math.PI) / 180)) / sigma ** 2;

  // Runge and Kutta's method in Dormand and Prince's form, for (m, log s): nodes, and weights of orders 5 and 4.
  const STAGES = [
    [], [1 / 5], [3 / 40, 9 / 40], [44 / 45, -56 / 15, 32 / 9],
    [19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729],
    [9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656],
    [35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84],
  ];
  const FOURTH = [5179 / 57600, 0, 7571 / 16695, 393 / 640, -92097 / 339200, 187 / 2100, 1 / 40];
  const along = (y, h, weights, k) => y.map((yi, i) => yi + h * weights.reduce((sum, wj, j) => sum + wj * k[j][i], 0));

  // The flow of the router up to a time, or to where it leaves the plane (`inside`) or has converged: on the axis, and
  // slower than any growth like log t.
  function flow(lawFor, start, time, tolerance, inside = () => true) {
    const drive = ([m, logS]) => {
      const { a, b } = drift(lawFor, m, Math.exp(logS));
      return [a * m + b, a];
    };
    const path = [{ t: 0, ...start }];
    let t = 0, y = [start.m, Math.log(start.s)], h = 1e-4, first = drive(y);
    while (t < time) {
      h = Math.min(h, time - t);
      const k = [first];
      for (let i = 1; i < 7; i += 1) k.push(drive(along(y, h, STAGES[i], k)));
      const next = along(y, h, STAGES[6], k), other = along(y, h, FOURTH, k);
      const error = Math.max(...next.map((yi, i) => Math.abs(yi - other[i]) / (tolerance * (1 + Math.abs(yi)))));
      if (error <= 1) {
        t += h;
        [y, first] = [next, k[6]];
        path.push({ t, m: y[0], s: Math.exp(y[1]) });
        if (!inside(path.at(-1)) || (y[1] < Math.log(1e-3 * y[0]) && Math.abs(first[0]) * t < 1e-4 * y[0])) break;
      }
      h *= Math.min(5, Math.max(0.2, 0.9 * error ** -0.2));
    }
    return path;
  }

  // Gradient descent with a fixed step, the experts at their optimum: w + eta (a w + b z).
  function descent(lawFor, start, eta, steps, inside = () => true) {
    const path = [start];
    for (let i = 0; i < steps && inside(path[i]); i += 1) {
      const { m, s } = path[i], { a, b } = drift(lawFor, m, Math.abs(s));
      path.push({ m: m + eta * (a * m + b), s: s + eta * a * s });
    }
    return path;
  }

  const PLANE = { norm: [0.1, 30], degrees: [0, 90] };
  const TIME = 1e6, STEPS = 400, UNTRUNCATED = 3.1;
  const radius = (state) => (state.radius === UNTRUNCATED ? Infinity : state.radius);
  const inside = (w) => Math.hypot(w.m, w.s) < 1e3;

  // Up to where something holds between two numbers.
  function last([low, high], holds) {
    for (let i = 0; i < 20; i += 1) {
      const middle = (low + high) / 2;
      if (holds(middle)) low = middle;
      else high = middle;
    }
    return low;
  }

  // The norm beyond which it shrinks, in the plane: at every angle the norm grows up to some length only; and the angle
  // beyond which a norm shrinks.
  const turn = (lawFor, degrees) =>
    Math.exp(last(PLANE.norm.map(Math.log), (norm) => growth(lawFor, Math.exp(norm), degrees) > 0));
  const tilt = (lawFor, norm) => last(PLANE.degrees, (degrees) => growth(lawFor, norm, degrees) > 0);

  // The edge of growth in the picture, up to its borders.
  function boundary(lawFor) {
    const angles = Array.from({ length: 46 }, (_, i) => 0.5 + (i * 89) / 45), [low, high] = PLANE.norm;
    const inner = angles.map((degrees) => [turn(lawFor, degrees), degrees])
      .filter(([norm]) => norm > 1.001 * low && norm < 0.999 * high);
    const ends = [high, low].map((norm) => [norm, tilt(lawFor, norm)]);
    const points = ends[0][1] > angles[0] ? [ends[0], ...inner, ends[1]] : [...inner, ends[1]];
    return points.map(([norm, degrees]) => [Math.log10(norm), degrees]);
  }

  // The noise has its own memory, so that moving a start does not compute the grey region anew.
  const field = Explorable.remembered(({ radius: r, sigma }) => {
    const lawFor = noise(r, sigma);
    return { lawFor, turns: boundary(lawFor) };
  });

  const seen = Explorable.remembered((state) => {
    const { lawFor, turns } = field({ radius: radius(state), sigma: state.sigma });
    const start = parts(10 ** state.norm, state.degrees);
    const stepped = descent(lawFor, start, 10 ** state.eta, STEPS, inside);
    return { turns, path: flow(lawFor, start, TIME, 1e-6, inside), stepped };
  });
  const place = (w) => {
    const { norm, degrees } = polar(w);
    return [Math.log10(norm), degrees];
  };

  // The first and the last step of a path, and of those between them at most 7 that are some way apart in the picture.
  function apart([, first, ...later]) {
    const far = [first];
    later.forEach((p) => {
      const [x, y] = far.at(-1);
      if (Math.hypot((p[0] - x) / 2.5, (p[1] - y) / 90) > 0.09 && far.length < 8) far.push(p);
    });
    return [...far, ...later.slice(-1)];
  }

  function draw(kit, state) {
    const plot = kit.plot(0, {
      x: PLANE.norm.map(Math.log10), y: PLANE.degrees, yticks: [0, 30, 60, 90],
      keys: [
        ["bound", "flow"], ["measured", "descent, some steps; hollow: past z", "thin"], ["muted", "the norm shrinks", "area"],
        ["sharp", radius(state) === Infinity ? "edge |w| = 2 cos θ / σ²" : "edge, truncated noise", "dashed"],
      ],
      xticks: [0.1, 0.3, 1, 3, 10, 30].map((norm) => [Math.log10(norm), `${norm}`]),
      xlabel: "norm of the router |w|", ylabel: "angle to z (degrees)",
    });
    const { turns, path, stepped } = seen(state), farthest = Math.log10(PLANE.norm[1]);
    plot.area([...turns, [turns.at(-1)[0], 90], [farthest, 90], [farthest, 0], [turns[0][0], 0]], "muted");
    plot.line(turns, "sharp", "dashed");
    if (radius(state) === Infinity) plot.dot(Math.log10(edge(state.sigma, 0)), 0, "sharp");
    const steps = stepped.map((w) => [...place(w), w.s < 0]), flowed = path.map(place);
    plot.line(steps, "measured", "thin");
    apart(steps).filter((step) => plot.holds(step)).forEach(([x, y, beyond]) => plot.dot(x, y, "measured", beyond));
    plot.line(flowed, "bound");
    plot.exit(steps, "measured");
    plot.exit(flowed, "bound");
    plot.grip(state.norm, state.degrees, "ink", (norm, degrees) => ({ norm, degrees }), true);
  }

  const words = (w) => {
    const { norm, degrees } = polar(w), { number } = Explorable;
    const beyond = norm < PLANE.norm[0] || norm > PLANE.norm[1] || degrees > PLANE.degrees[1];
    return `norm ${number(norm, norm < 10 ? 2 : 1)} and angle ${number(degrees, degrees < 9.95 ? 1 : 0)}°`
      + (beyond ? " (outside the picture)" : "");
  };

  function readout(state) {
    const { path, stepped } = seen(state), ends = path.at(-1);
    const untruncated = radius(state) === Infinity, { norm, degrees } = polar(ends);
    const { lawFor } = field({ radius: radius(state), sigma: state.sigma });
    const best = untruncated ? edge(state.sigma, 0) : turn(lawFor, 0);  // where the flow ends, if clusters overlap
    const there = best < 0.99 * PLANE.norm[1] && Math.abs(norm - best) < 1e-3 * best && degrees < 0.05;
    const stops = there || ends.t < TIME ? "converges to" : "still moves at time 10⁶, at";
    const bayes = untruncated ? `, Bayes’ router (green dot)` : "";
    return `The flow ${stops} ${words(ends)}${bayes}. The first step of descent ends at ${words(stepped[1])}, `
      + `${stepped[1].s < 0 ? "past" : "before"} z; step ${stepped.length - 1} ends at ${words(stepped.at(-1))}.`;
  }

  const power = (exponent) => {
    const value = 10 ** exponent;
    return Explorable.number(value, value < 0.1 ? 3 : value < 10 ? 2 : 1);
  };

  Explorable.add("two_gaussians", {
    title: "The flow turns towards z",
    says: "Drag the dot, the initial router. Does the flow ever turn away from z, the clusters' axis (angle 0)? Press "
      + "Reset, and raise the step size η until the first step of descent crosses z (hollow dot).",
    shows: "The plane of norm and angle, with the paths of the flow and of descent; grey where the norm shrinks.",
    handles: [
      { key: "norm", label: "Initial norm", min: -1, max: 1.46, step: 0.02, value: -0.3, text: power },
      { key: "degrees", label: "Initial angle", min: 1, max: 89, step: 1, value: 70,
        text: (value) => `${value}°` },
      { key: "radius", label: "Noise truncated at radius", min: 0.2, max: UNTRUNCATED, step: 0.1, value: UNTRUNCATED,
        text: (value) => (value === UNTRUNCATED ? "∞ (none)" : Explorable.number(value, 1)) },
      { key: "sigma", label: "σ before truncation", min: 0.5, max: 1.5, step: 0.05, value: 1 },
      { key: "eta", label: "Step size η", min: -2, max: 0.6, step: 0.05, value: -1.4, text: power },
    ],
    height: 400,
    narrow: [310],
    draw,
    readout,
    formulas: { noise, drift, polar, parts, growth, edge, turn, tilt, flow, descent },
  });
})();
