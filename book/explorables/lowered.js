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
  const output = (gates, answers) => [0, 1].map((x) => gates.reduce((sum, g, i) => sum + g * answers[i][x], 0));

  // By this factor the output of the full-softmax gate grows: 1 / (1 - pi_j (1 - e^-t)).
  const grows = (h, j, t) => 1 / (1 - softmax(h)[j] * (1 - Math.exp(-t)));

  const distance = ([a, b], [c, d]) => Math.hypot(a - c, b - d);

  // The unselected expert of some rank, 3 to 6 from the largest logit on.
  const ranked = (h, rank) => h.map((_, i) => i).sort((i, j) => h[j] - h[i])[rank - 1];

  // A layer for one token: six logits, and six answers in the plane; drawn again until the picture can show it.
  function layer(seed) {
    const next = Explorable.normals(seed);
    for (;;) {
      const h = Array.from({ length: 6 }, next), answers = h.map(() => [next(), next()]);
      const inside = answers.flat().every((part) => Math.abs(part) < 2) && h.every((hi) => Math.abs(hi) < 3);
      const crowded = answers.some((p, i) => answers.slice(0, i).some((q) => distance(p, q) < 0.5));
      const length = Math.hypot(...output(renormalized(h), answers)), matters = softmax(h)[ranked(h, 3)] > 0.1;
      if (inside && !crowded && length > 0.8 && length < 2 && matters) return { h, answers };
    }
  }

  const seen = Explorable.remembered((state) => {
    const { h, answers } = layer(state.seed), j = ranked(h, state.rank), now = lowered(h, j, state.t);
    const ends = (gate) => [h, now].map((logits) => output(GATES[gate](logits), answers));
    return { h, answers, j, now, ends, factor: grows(h, j, state.t) };
  });

  const NAMES = { renormalized: "renormalized", fullSoftmax: "full softmax" };
  const COLOURS = { renormalized: "topk_softmax", fullSoftmax: "softmax_topk" };

  const LOW = -6;  // from there bars rise, so that a logit near 0 is seen
  const APART = 0.18;  // of the two outputs, which point the same way and are drawn side by side

  function drawOutputs(plot, state) {
    const { h, answers, j, ends } = seen(state);
    const shown = state.hidden && !state.said ? [[state.hidden, "ink"]] : Object.entries(COLOURS);
    shown.forEach(([gate, colour], i) => {
      const [before, after] = ends(gate), apart = (shown.length - 1) * (i - 0.5) * APART / Math.hypot(...after);
      const aside = ([x, y]) => [x - apart * after[1], y + apart * after[0]];
      plot.arrow(aside([0, 0]), aside(after), colour);
      if (distance(before, after) < 0.02) return;
      plot.line([aside([0, 0]), aside(before)], "ink", "thin dashed");
      plot.dot(...aside(before), "ink", true);
    });
    plot.dot(0, 0, "muted");
    answers.forEach(([x, y], i) => {
      plot.dot(x, y, i === j ? "bound" : selected(h)[i] ? "measured" : "reference", !selected(h)[i]);
      plot.text(x, y, `${i + 1}`, "middle", [0, -9]);
    });
  }

  const outputKeys = ({ hidden, said }) => (hidden && !said
    ? [["ink", "output F; circle: before"]]
    : [["topk_softmax", "F, renormalized"], ["softmax_topk", "F, full softmax; circle: before"]]);

  function draw(kit, state) {
    const wide = [-2.2, 2.2], words = { xlabel: "first coordinate", ylabel: "second coordinate" };
    drawOutputs(kit.plot(0, { x: wide, y: wide, keys: outputKeys(state), equal: true, ...words }), state);
    const { h, j, now } = seen(state);
    const plot = kit.plot(1, {
      x: [0.4, 6.6], y: [LOW, 3], xticks: [1, 2, 3, 4, 5, 6], xlabel: "expert", ylabel: "logit",
      keys: [["measured", "selected"], ["reference", "not selected"], ["bound", "lowered; circle: before"]],
    });
    now.forEach((hi, i) => plot.bar(i + 1, hi, 0.6, i === j ? "bound" : selected(h)[i] ? "measured" : "reference", LOW));
    plot.dot(j + 1, h[j], "ink", true);
  }

  function readout(state) {
    const { h, j, ends, factor } = seen(state), number = (value) => Explorable.number(value, 4);
    const lengths = (gate) => ends(gate).map((end) => number(Math.hypot(...end)));
    const head = `Logit ${j + 1} falls by ${Explorable.number(state.t, 1)}.`;
    if (state.hidden && !state.said) {
      const [before, after] = lengths(state.hidden);
      return state.t ? `${head} |F| goes from ${before} to ${after}. Which gate is it?`
        : `|F| is ${before}. Lower logit ${j + 1}${state.again ? " before you answer" : ""}, and see what F does.`;
    }
    const [before, after] = lengths("fullSoftmax"), [stays] = lengths("renormalized");
    const both = !state.t ? `Renormalized gate: |F| is ${stays}. Full-softmax gate: |F| is ${before}.`
      : `${head} Renormalized gate: |F| stays ${stays}. Full-softmax gate: |F| grows from ${before} to `
        + `${after}, by a factor of ${number(factor)} (πᵃ${"₁₂₃₄₅₆"[j]} = ${number(softmax(h)[j])}).`;
    if (!state.hidden) return state.said ? `Press New layer first. ${both}` : both;
    const does = state.hidden === "renormalized" ? "stays" : "changes";
    const judged = `${state.again ? "Already answered. " : ""}${state.said === state.hidden ? "Right" : "No"} `
      + `(${state.right} of ${state.asked})`;
    return `${judged}: F ${does}, so it is ${NAMES[state.hidden]}. ${both}`;
  }

  const drawLayer = ({ seed }) => ({
    seed: seed + 1, said: "", again: false, t: 0,
    hidden: Explorable.normals(7919 * (seed + 1))() > 0 ? "renormalized" : "fullSoftmax",
  });

  /** One answer for a layer, and none before something was to be seen. */
  const answer = (said) => ({ hidden, said: before, t, asked, right }) => {
    if (!hidden) return { said };
    return before || !t ? { again: true } : { said, again: false, asked: asked + 1, right: right + (said === hidden) };
  };

  Explorable.add("lowered", {
    title: "Which gate is it?",
    says: "Dots are six experts' answers, and arrows are the outputs F of two gates. Press New layer, which hides its "
      + "gate. Lower a logit, watch F, and name the gate.",
    shows: "First, six experts' answers and the output of each visible gate as an arrow; second, the six logits, two of "
      + "them selected.",
    handles: [
      { key: "t", label: "Lowered by t", min: 0, max: 3, step: 0.1, value: 3 },
      { key: "rank", label: "Unselected logit", value: "3",
        choices: { 3: "largest", 4: "second", 5: "third", 6: "smallest" } },
      { label: "New layer", press: drawLayer },
      { label: "It is renormalized", press: answer("renormalized") },
      { label: "It is full softmax", press: answer("fullSoftmax") },
    ],
    state: { seed: 1, hidden: "", said: "", again: false, asked: 0, right: 0 },
    height: 360,
    narrow: [240, 190],
    draw,
    readout,
    formulas: { softmax, selected, fullSoftmax, renormalized, lowered, output, grows, layer, drawLayer },
  });
})();
