// Chapter 3: routing probabilities under noise, p_m(h) = int g(u - h_m) prod_{j != m} G(u - h_j) du, and their slopes.

{
  // Gauss-Legendre with four nodes on [-1, 1]: exact to degree 7, enough for the polynomials of seven experts.
  const LEGENDRE = [
    [-0.8611363115940526, 0.3478548451374538], [-0.3399810435848563, 0.6521451548625461],
    [0.3399810435848563, 0.6521451548625461], [0.8611363115940526, 0.3478548451374538],
  ];
  const REACH = 9;  // standard deviations around the largest logit that Gaussian integrals cover
  const MOST = 6;

  const bell = (z) => Math.exp(-z * z / 2) / Math.sqrt(2 * Math.PI);

  /** Distribution function of N(0, 1), by bell(z) (z + z^3/3 + z^5/(3 5) + ...), whose terms have one sign. */
  function series(z) {
    let term = z, sum = z;
    for (let n = 3; Math.abs(term) > 1e-17; n += 2) sum += term *= z * z / n;
    return 0.5 + bell(z) * sum;
  }

  const END = 8, FINE = 64;  // the series is tabulated from -END to END, FINE values to a unit
  const TABLE = Array.from({ length: 2 * END * FINE + 1 }, (_, i) => series(i / FINE - END));

  /** The same, by four terms of Taylor's series from the nearest value: right to 1e-12, and a picture takes 25,000. */
  function normal(z) {
    if (Math.abs(z) >= END) return z > 0 ? 1 : 0;
    const i = Math.round((z + END) * FINE), a = i / FINE - END, d = z - a;
    return TABLE[i] + bell(a) * d * (1 - d * (a / 2 - d * ((a * a - 1) / 6 - d * (a ** 3 - 3 * a) / 24)));
  }

  const LAWS = {
    uniform: {
      density: (z) => (z >= 0 && z < 1 ? 1 : 0),
      distribution: (z) => Math.min(1, Math.max(0, z)),
      kappa: 1,
      // The integrand is a polynomial between the places where a factor reaches 1.
      nodes(h) {
        const ends = [0, ...h.map((h_j) => Math.max(0, 1 + h_j)).sort((a, b) => a - b)];
        return ends.slice(1).flatMap((right, i) => LEGENDRE.map(([z, w]) =>
          [ends[i] + (right - ends[i]) * (1 + z) / 2, (right - ends[i]) * w / 2]));
      },
    },
    gaussian: {
      density: bell,
      distribution: normal,
      kappa: bell(0),
      // The integrand is analytic and fades at both ends: the trapezoidal rule converges faster than any power.
      nodes(h) {
        const steps = 2 * Math.ceil(REACH * (2 + Math.sqrt(h.length))), step = 2 * REACH / steps;
        return Array.from({ length: steps + 1 }, (_, i) => [i * step - REACH, step]);
      },
    },
  };

  /** Logits in units of the noise's width, the largest at 0. */
  const scaled = (h, scale) => h.map((h_m) => (h_m - Math.max(...h)) / scale);

  /** int f(u - h_m) prod_{j != m} G(u - h_j) du. */
  function integral(h, m, law, f) {
    const { nodes, distribution } = LAWS[law];
    const others = (u) => h.reduce((product, h_j, j) => (j === m ? product : product * distribution(u - h_j)), 1);
    return nodes(h).reduce((sum, [u, w]) => sum + w * f(u - h[m]) * others(u), 0);
  }

  /** Probability that expert m of M wins. */
  const probability = (h, m, law, scale) => integral(scaled(h, scale), m, law, LAWS[law].density);

  /** sum_j |dp_m / dh_j|: how fast p_m changes if h_m rises and all others fall. At most 2 kappa. */
  function slope(h, m, law, scale) {
    const z = scaled(h, scale);
    if (law === "gaussian") return integral(z, m, law, (t) => 2 * t * bell(t)) / scale;
    const below = (t) => z.reduce((p, z_j, j) => (j === m ? p : p * LAWS.uniform.distribution(t - z_j)), 1);
    return 2 * (below(z[m] + 1) - below(z[m])) / scale;
  }

  const kappa = (law, scale) => LAWS[law].kappa / scale;
  const moved = (h, D) => h.map((h_m, m) => h_m + (m ? -D : D));  // expert 1 up, all others down

  const logits = ({ h1, h2, h3, experts }) => [h1, h2, h3, 0, 0, 0].slice(0, experts);
  const logit = (m, value) => ({ key: `h${m}`, label: `Logit ${m}`, min: -1, max: 1, step: 0.05, value });
  const range = (low, high, n) => Array.from({ length: n + 1 }, (_, i) => low + (high - low) * i / n);
  const { number, expert } = Explorable;

  Explorable.add("noise", {
    title: "The slope never leaves the band",
    says: "Tie the logits and narrow the noise. The dashed tangent and the band steepen. Add experts, and tie "
      + "again. Is any slope steeper than 2κ?",
    shows: "First, a bar for each expert's probability. Second, the probability of expert 1 while its logit rises by D "
      + "and all others fall by D, with its tangent and a band of slope 2κ.",
    handles: [
      logit(1, 0.2), logit(2, 0), logit(3, -0.15),
      { key: "law", label: "Noise", value: "uniform", choices: { uniform: "uniform", gaussian: "Gaussian" } },
      { key: "scale", label: "Width (Gaussian: σ)", min: 0.1, max: 2, step: 0.05, value: 1 },
      { key: "experts", label: "Experts", min: 3, max: MOST, step: 1, value: 3,
        text: (n) => (n > 3 ? `${n} (logits from 4 on: 0)` : "3") },
      { label: "Tie all logits", press: () => ({ h1: 0, h2: 0, h3: 0 }) },
    ],
    height: 300,
    narrow: [150, 200],
    draw({ plot }, state) {
      const { law, scale } = state, h = logits(state), k = 2 * kappa(law, scale), far = 0.6;
      const bars = plot(0, {
        x: [0.4, h.length + 0.6], y: [0, 1], xlabel: "expert", ylabel: "probability of winning",
        xticks: h.map((_, m) => m + 1),
      });
      h.forEach((_, m) => bars.bar(m + 1, probability(h, m, law, scale), 0.6, expert(m)));

      const p = probability(h, 0, law, scale), tangent = slope(h, 0, law, scale);
      const curve = plot(1, {
        x: [-far, far], y: [0, 1], xlabel: "D: logit 1 rises, others fall", ylabel: "probability of expert 1",
        keys: [["measured", "p₁"], ["measured", "tangent", "dashed"], ["sharp", "slope up to 2κ", "area"]],
      });
      for (const D of [-far, far]) curve.area([[0, p], [D, p + k * D], [D, p - k * D]], "sharp");
      for (const sign of [-1, 1]) curve.line([[-far, p - sign * k * far], [far, p + sign * k * far]], "sharp", "thin");
      curve.line(range(-far, far, 120).map((D) => [D, probability(moved(h, D), 0, law, scale)]), "measured");
      curve.line([[-far, p - tangent * far], [far, p + tangent * far]], "measured", "dashed");
      curve.dot(0, p, "measured");
    },
    readout(state) {
      const { law, scale } = state, h = logits(state), M = h.length;
      const [p, steep, k] = [probability(h, 0, law, scale), slope(h, 0, law, scale), kappa(law, scale)];
      const certain = p < 1e-12 || p > 1 - 1e-12, rounded = { "0.00": "below 0.01", "1.00": "above 0.99" }[number(p)];
      return `Expert 1 wins with probability ${certain ? number(p, 0) : rounded ?? number(p)}. To first order a move D of `
        + `the logits changes it by at most ${number(steep)} D. The slope ${number(steep)} is `
        + `${number(50 * steep / k, 0)} % of 2κ = ${number(2 * k)}; the paper allows κM² = ${number(M * M * k, 1)}.`;
    },
    formulas: { probability, slope, kappa },
  });
}
