// One token of chapter 26: an unselected logit is lowered, and the output moves or does not.

(() => {
  const K = 2;

  function softmax(h) {
    const top = Math.max(...h), e = h.map((hi) => Math.exp(hi - top)), sum = e.reduce((a, b) => a + b);
    return e.map((ei) => ei / sum);
  }

  // True at the K largest logits.
  function selected(h) {
    const best = h.map((_, i) => i).sort((i, j) => h[j] - h[i]).slice(0, K);
    return h.map((_, i) => best.includes(i));
  }

  // The gates, 0 where an expert is not selected: a softmax over all logits, or over the selected ones only.
  const fullSoftmax = (h) => softmax(h).map((pi, i) => (selected(h)[i] ? pi : 0));
  const renormalized = (h) => softmax(h.map((hi, i) => (selected(h)[i] ? hi : -Infinity)));
  const GATES = { renormalized, fullSoftmax };

  const lowered = (h, j, t) => h.map((hi, i) => (i === j ? hi - t : hi));
  const output = (gates, answers) => [0, 1].map((axis) => gates.reduce((sum, g, i) => sum + g * answers[i][axis], 0));

  // By this factor the output of the full-softmax gate grows: 1 / (1 - pi_j (1 - e^-t)).
  const grows = (h, j, t) => 1 / (1 - softmax(h)[j] * (1 - Math.exp(-t)));

  // A layer for one token: six logits, and six answers in the plane; drawn again until the output is not short.
  function layer(seed) {
    const next = Explorable.normals(seed);
    for (;;) {
      const h = Array.from({ length: 6 }, next), answers = h.map(() => [next(), next()]);
      const length = Math.hypot(...output(renormalized(h), answers)), { low, high } = { low: 0.8, high: 2 };
      if (length > low && length < high && answers.flat().every((part) => Math.abs(part) < 2)) return { h, answers };
    }
  }

  // The unselected expert of some rank, 3 to 6 from the largest logit on.
  const ranked = (h, rank) => h.map((_, i) => i).sort((i, j) => h[j] - h[i])[rank - 1];

  const seen = Explorable.remembered((state) => {
    const { h, answers } = layer(state.seed), j = ranked(h, state.rank), now = lowered(h, j, state.t);
    const ends = (gate) => [h, now].map((logits) => output(GATES[gate](logits), answers));
    return { h, answers, j, now, ends, factor: grows(h, j, state.t) };
  });

  const NAMES = { renormalized: "renormalized", fullSoftmax: "full softmax" };
  const COLOURS = { renormalized: "topk_softmax", fullSoftmax: "softmax_topk" };

  function drawOutputs(plot, state) {
    const { h, answers, j, ends } = seen(state);
    answers.forEach(([x, y], i) => {
      plot.dot(x, y, i === j ? "bound" : selected(h)[i] ? "measured" : "reference", !selected(h)[i]);
      plot.text(x, y + 0.22, `${i + 1}`);
    });
    const shown = state.hidden && !state.said ? [[state.hidden, "ink"]] : Object.entries(COLOURS);
    shown.forEach(([gate, colour]) => {
      const [before, after] = ends(gate);
      plot.arrow([0, 0], after, colour);
      if (Math.hypot(after[0] - before[0], after[1] - before[1]) > 0.02) plot.dot(...before, colour, true);
    });
    plot.key(state.hidden && !state.said
      ? [["ink", "output F; circle: before"]]
      : [["topk_softmax", "F, renormalized"], ["softmax_topk", "F, full softmax"]]);
  }

  function draw(kit, state) {
    const axes = { x: [-2.2, 2.2], y: [-2.2, 2.2], keys: 2, equal: true, xlabel: "first coordinate", ylabel: "answers and output" };
    drawOutputs(kit.plot(0, axes), state);
    const { h, j, now } = seen(state);
    const plot = kit.plot(1, {
      x: [0.4, 6.6], y: [-8, 4], keys: 2, xticks: [1, 2, 3, 4, 5, 6], yticks: [-8, -4, 0, 4], xlabel: "expert", ylabel: "logit",
    });
    now.forEach((hi, i) => plot.bar(i + 1, hi, 0.6, i === j ? "bound" : selected(h)[i] ? "measured" : "reference"));
    plot.dot(j + 1, h[j], "bound", true);
    plot.key([["measured", "selected"], ["bound", "lowered; circle: before"]]);
  }

  function readout(state) {
    const { h, j, ends, factor } = seen(state), number = (value) => Explorable.number(value, 3);
    const [before, after] = ends(state.hidden || "fullSoftmax").map((end) => number(Math.hypot(...end)));
    const head = `Logit ${j + 1} falls by ${Explorable.number(state.t, 1)}.`;
    if (state.hidden && !state.said) return `${head} The length of F goes from ${before} to ${after}. Which gate does that?`;
    const full = ends("fullSoftmax").map((end) => number(Math.hypot(...end)));
    const both = `${head} Renormalized, the length of F stays ${number(Math.hypot(...ends("renormalized")[1]))}. Full softmax, it `
      + `goes from ${full[0]} to ${full[1]}, by the factor ${number(factor)} (π = ${number(softmax(h)[j])}).`;
    if (!state.hidden) return both;
    return `${state.said === state.hidden ? "Right" : "No"}, it is ${NAMES[state.hidden]}. ${both}`;
  }

  const drawLayer = ({ seed }) => ({
    seed: seed + 1, hidden: Explorable.normals(7919 * (seed + 1))() > 0 ? "renormalized" : "fullSoftmax", said: "", t: 0,
  });

  Explorable.add("lowered", {
    title: "Which gate is it?",
    says: "Draw a layer, lower the logit of an unselected expert, and say from the output which gate the layer has.",
    shows: "Left, the answers of six experts and the output of the layer as an arrow; right, the six logits, two of them selected.",
    handles: [
      { key: "t", label: "Lowered by t =", min: 0, max: 5, step: 0.1, value: 1 },
      { key: "rank", label: "Unselected logit", value: "3",
        choices: { 3: "largest", 4: "second", 5: "third", 6: "smallest" } },
      { label: "Draw a layer", press: drawLayer },
      { label: "It is renormalized", press: ({ hidden }) => (hidden ? { said: "renormalized" } : {}) },
      { label: "It is full softmax", press: ({ hidden }) => (hidden ? { said: "fullSoftmax" } : {}) },
    ],
    state: { seed: 1, hidden: "", said: "" },
    panels: 2,
    height: 360,
    draw,
    readout,
    formulas: { softmax, selected, fullSoftmax, renormalized, lowered, output, grows, layer, drawLayer },
  });
})();
