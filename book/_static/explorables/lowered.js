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
  const GATES = { renormalized, "full softmax": fullSoftmax };

  const lowered = (h, j, t) => h.map((hi, i) => (i === j ? hi - t : hi));
  const output = (gates, answers) => [0, 1].map((axis) => gates.reduce((sum, g, i) => sum + g * answers[i][axis], 0));

  // By this factor the output of the full-softmax gate grows: 1 / (1 - pi_j (1 - e^-t)).
  const grows = (h, j, t) => 1 / (1 - softmax(h)[j] * (1 - Math.exp(-t)));

  Explorable.add("lowered", { formulas: { softmax, selected, fullSoftmax, renormalized, lowered, output, grows } });
})();
