// Chapter 14: the gates of selected experts, renormalized or from a softmax over all, and the risk of a threshold b
// between two experts: logits (x - b, 0), outputs +1 and -1, label sign x, x uniform on [-1, 1], squared loss, K = 1.

{
  /** Gates of the K largest logits: softmax over the selected (renormalized), or over all. */
  function gates(h, K, renormalized) {
    const selected = h.map((_, m) => m).sort((i, j) => h[j] - h[i]).slice(0, K);
    const weights = h.map((h_m) => Math.exp(h_m - Math.max(...h)));
    const over = renormalized ? selected : h.map((_, m) => m);
    const total = over.reduce((sum, m) => sum + weights[m], 0);
    return weights.map((w, m) => (selected.includes(m) ? w / total : 0));
  }

  const sigmoid = (t) => 1 / (1 + Math.exp(-t));
  const right = (t) => sigmoid(-t) ** 2;  // loss at the distance t from the threshold: the gate is sigmoid(t)
  const wrong = (t) => (1 + sigmoid(t)) ** 2;
  const missing = (t) => Math.LN2 - Math.log1p(Math.exp(-t));  // integral of 1 - sigmoid from 0 to t
  const rightTo = (t) => missing(t) + sigmoid(-t) - 0.5;  // integrals of the two losses
  const wrongTo = (t) => 4 * t - 4 * missing(t) + rightTo(t);

  /** R(b); renormalized, the loss is 4 between 0 and b. */
  function risk(b, renormalized) {
    const a = Math.abs(b);
    return renormalized ? 2 * a : (rightTo(1 + a) - rightTo(a) + wrongTo(a) + rightTo(1 - a)) / 2;
  }

  /** R'(b), b not 0. */
  function slope(b, renormalized) {
    const a = Math.abs(b);
    return Math.sign(b) * (renormalized ? 2 : (right(1 + a) - right(a) + wrong(a) - right(1 - a)) / 2);
  }

  /** Mean of the per-example gradients: R' without what the examples at the threshold lose by changing sides. */
  function reported(b, renormalized) {
    const jump = renormalized ? 4 : wrong(0) - right(0);
    return slope(b, renormalized) - Math.sign(b) * jump / 2;
  }

  const KINDS = [["topk_softmax", true], ["softmax_topk", false]];
  const EDGE = 0.8;  // of the thresholds shown
  const logits = ({ h1, h2, h3, h4 }) => [h1, h2, h3, h4];
  const logit = (m, value) => ({ key: `h${m}`, label: `Logit ${m}`, min: -2, max: 2, step: 0.1, value });
  const { number } = Explorable;

  Explorable.add("softmaxes", {
    title: "At K = 1 renormalizing hides the slope",
    says: "First picture: move the logits. At K = 1 the renormalized gate stays 1. Second picture: drag the threshold "
      + "b. How much of each risk's slope does backpropagation (dashed) report?",
    shows: "First, the gates of four experts under both rules. Second, the risk against the threshold under both rules, "
      + "with dashed lines of the slope that backpropagation reports.",
    handles: [
      { heading: "Gates of four experts" },
      logit(1, 1.2), logit(2, 0.4), logit(3, -0.3), logit(4, -1),
      { key: "K", label: "Selected experts", value: "1", choices: { 1: "K = 1", 2: "K = 2" } },
      { heading: "Risk of two experts, K = 1" },
      { key: "b", label: "Threshold b", min: -EDGE, max: EDGE, step: 0.05, value: 0.5 },
    ],
    height: 330,
    narrow: [170, 200],
    draw({ plot }, state) {
      const h = logits(state), { b } = state;
      const bars = plot(0, {
        x: [0.4, 4.6], y: [0, 1], xticks: [1, 2, 3, 4], xlabel: "expert", ylabel: "gate",
        keys: [["topk_softmax", "renormalized"], ["softmax_topk", "full softmax"]],
      });
      const risks = plot(1, {
        x: [-EDGE, EDGE], y: [0, 1.8], xlabel: "threshold b", ylabel: "risk, K = 1 of 2",
        keys: [["ink", "risk"], ["ink", "reported slope", "dashed"]],
      });
      KINDS.forEach(([name, renormalized], side) => {
        gates(h, Number(state.K), renormalized).forEach((gate, m) => bars.bar(m + 0.82 + 0.36 * side, gate, 0.32, name));
        const curve = Array.from({ length: 65 }, (_, i) => EDGE * (i - 32) / 32).map((t) => [t, risk(t, renormalized)]);
        risks.line(curve, name);
        const r = risk(b, renormalized), tangent = reported(b, renormalized);
        if (b) risks.line([-0.35, 0.35].map((t) => [b + t, r + t * tangent]), name, "dashed");
        if (!renormalized) risks.dot(b, r, name);
      });
      risks.grip(b, risk(b, true), "topk_softmax", (x) => ({ b: x }));
    },
    readout(state) {
      const { b, K } = state, [own, all] = [true, false].map((kind) => gates(logits(state), Number(K), kind));
      const sum = (values) => number(values.reduce((total, value) => total + value, 0));
      const sums = `Renormalized gates sum to ${sum(own)}, full-softmax gates to ${sum(all)}.`;
      if (b === 0) return `${sums} At b = 0 both risks have a kink and no slope.`;
      const [steep, flat] = [true, false].map((kind) => number(slope(b, kind)));
      return `${sums} At b = ${number(b)} backpropagation reports ${reported(b, true)} of the renormalized slope ${steep} `
        + `and ${number(reported(b, false))} of the full-softmax slope ${flat}.`;
    },
    formulas: { gates, risk, slope, reported },
  });
}
