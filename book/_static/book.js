// Filters, scrolling boxes that the keyboard reaches, figures that move. No library, no network.

// A filter shows the rows that have all that is chosen, and every word that is written. A row is what is shown or not,
// with its words and its marks.
function filterRows(form, rows) {
  const fields = [...form.querySelectorAll("select, input")];
  const plain = (text) => text.toLowerCase().replaceAll(/[-‐–]/g, " ");
  const small = new Set(["a", "al", "and", "et", "in", "of", "the"]);
  const letters = (text) => text.split(/[^\p{L}\d]+/u);  // a letter alone, as in z-loss, is no part of frozen
  const holds = (words, asked) => plain(asked).split(/\s+/).every((word) => small.has(word)
    || (word.length > 1 ? plain(words).includes(word) : letters(plain(words)).includes(word)));
  const show = () => {
    const shown = rows.filter(({ words, marks }) => fields.every(({ name, value }) =>
      !value || (name === "text" ? holds(words, value) : marks[name] === value)));
    rows.forEach((row) => row.parts.forEach((part) => { part.hidden = !shown.includes(row); }));
    document.querySelectorAll("section:has(> dl.glossary)").forEach((section) => {
      section.hidden = !shown.some(({ parts }) => section.contains(parts[0]));
    });
    const other = shown.length ? "" : ". Try other words, or search the book.";
    form.querySelector("output").value = `${shown.length} of ${rows.length} ${form.dataset.of}${other}`;
  };
  const asked = new URLSearchParams(location.search);
  fields.forEach((field) => { field.value = asked.get(field.name) ?? ""; });
  form.addEventListener("input", () => {
    const chosen = fields.filter(({ value }) => value).map(({ name, value }) => [name, value]);
    history.replaceState(null, "", chosen.length ? `?${new URLSearchParams(chosen)}` : location.pathname);
    show();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}

// Places of the papers, ranges by their members; without the numbers of the book's boxes, which would be taken for
// them, and without the claims that one rests on.
function ledgerRows() {
  const boxed = (cell) => cell.querySelector(".claim-box, .claim-rest") && cell.firstChild;
  const said = (cell) => (boxed(cell) ?? cell.querySelector("summary") ?? cell).textContent;
  const texts = (row) => [...row.cells].map(said);
  return [...document.querySelectorAll("table.ledger tbody tr")].map((row) => (
    { parts: [row], marks: row.dataset, words: [...texts(row), row.dataset.places].join("\n").toLowerCase() }));
}

// Lines of the page of questions: an answer and what it is an answer to.
function glossaryRows() {
  return [...document.querySelectorAll("dl.glossary > dd")].map((answer) => {
    const parts = [answer];
    while (parts[0].previousElementSibling?.matches("dt")) parts.unshift(parts[0].previousElementSibling);
    return { parts, marks: {}, words: parts.map((part) => part.textContent).join("\n").toLowerCase() };
  });
}

// On the map the claim that one points at stands out, with those it rests on and those that rest on it.
function lightNeighbours(map) {
  const boxes = [...map.querySelectorAll("a.node")];
  const light = (event) => {
    const box = event.type === "focusout" || event.type === "pointerleave" ? null : event.target.closest("a.node");
    const near = new Set(box ? [box.dataset.claim, ...box.dataset.near.split(" ")] : []);
    boxes.forEach((each) => each.classList.toggle("lit", near.has(each.dataset.claim)));
    map.classList.toggle("pointed", Boolean(box));
  };
  ["pointerover", "pointerleave", "focusin", "focusout"].forEach((kind) => map.addEventListener(kind, light));
}

// A box that scrolls sideways can be reached with the keyboard, and says that it goes on. The browser tells sizes when
// it has laid the page out: nothing is laid out for the question, and nothing in a fold before it is opened.
function markScrolling(boxes) {
  const sizes = new ResizeObserver((changes) => {
    const scrolls = changes.map(({ target }) => target.clientWidth > 0 && target.scrollWidth > target.clientWidth + 4
      && ["auto", "scroll"].includes(getComputedStyle(target).overflowX));
    changes.forEach(({ target }, k) => {
      target.classList.toggle("scrolls", scrolls[k]);
      if (scrolls[k]) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    });
  });
  boxes.forEach((box) => sizes.observe(box));
}

const BOXES = "article pre, article div.math > math, article .claim-card, article .erratum, "
  + "article :is(figure, div).book-figure, article figure.align-default, article .erratum table, "
  + "article .pst-scrollable-table-container, article .table-wrapper";

// What an address leads to is shown, though it stands in a fold.
function openFolds() {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const closed = [];
  for (let fold = place?.closest("details"); fold; fold = fold.parentElement.closest("details")) {
    if (!fold.open) closed.push(fold);
  }
  closed.forEach((fold) => { fold.open = true; });
  if (closed.length) place.scrollIntoView();
}

// A figure that moves brings its script with it; addresses are taken from this script's, so that it works from disk.
const EXPLORABLES = new URL("../explorables/", document.currentScript.src);
function loadExplorables(places) {
  const put = (name, made) => document.head.append(Object.assign(document.createElement(name), made));
  const script = (path) => put("script", { src: new URL(path, EXPLORABLES), async: false });
  put("link", { rel: "stylesheet", href: new URL("explorables.css", EXPLORABLES) });
  script("explorables.js");
  new Set(places.map((place) => place.dataset.explorable)).forEach((name) => script(`${name}.js`));
}

// A link to a theorem, a formula, a verdict box or a reference shows it where a mouse points or the keyboard stands.
// It stays while one points at it, and Escape takes it away. What stands on a page comes with that page's script.
const ROOT = new URL("../", document.currentScript.src).href;
const previews = {};

function previewOf(link, show) {
  const [address, id] = link.href.split("#");
  if (!id || !address.startsWith(ROOT)) return;
  const page = address.slice(ROOT.length), found = () => previews[page]?.[decodeURIComponent(id)];
  const tell = () => found() && show(found());
  if (page in previews) return tell();
  const script = Object.assign(document.createElement("script"), {
    src: `${ROOT}previews/${page.replace(/html$/, "js")}`, onload: tell, onerror: () => { previews[page] = {}; } });
  document.head.append(script);
}

// Where the sentence of a link begins and ends, which a preview leaves to be read; at most some lines away.
const NEAR = 130, GAP = 4;
function sentenceAt(link) {
  const block = link.closest("p, li, dt, dd, th, td, figcaption") ?? link, place = link.getBoundingClientRect();
  const texts = document.createTreeWalker(block, NodeFilter.SHOW_TEXT), rest = document.createRange();
  rest.selectNodeContents(block);
  rest.setStartAfter(link);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    const end = rest.comparePoint(text, text.length) === 0 ? text.data.search(/[.?!](\s|$)/) : -1;
    if (end >= 0) {
      rest.setEnd(text, end + 1);
      break;
    }
  }
  const first = block.getBoundingClientRect().top;
  const last = Math.max(place.bottom, ...[...rest.getClientRects()].map(({ bottom }) => bottom));
  return [Math.max(first, place.top - NEAR) - GAP, Math.min(last, place.bottom + NEAR) + GAP];
}

function showPreviews(article) {
  const box = Object.assign(document.createElement("div"), { className: "preview", id: "preview", hidden: true });
  box.setAttribute("role", "tooltip");
  article.append(box);
  let asked = null, wait;
  const hide = () => { asked?.removeAttribute("aria-describedby"); asked = null; box.hidden = true; };
  const show = (link) => {
    asked = link;
    previewOf(link, (html) => {
      if (asked !== link) return;
      box.innerHTML = html;
      box.hidden = false;
      link.setAttribute("aria-describedby", "preview");
      const place = link.getClientRects()[0], around = article.getBoundingClientRect();
      const [top, bottom] = sentenceAt(link);
      const below = bottom + box.offsetHeight < innerHeight || top < box.offsetHeight;
      box.style.left = `${Math.max(0, Math.min(place.left - around.left, around.width - box.offsetWidth))}px`;
      box.style.top = `${(below ? bottom : top - box.offsetHeight) - around.top}px`;
    });
  };
  const later = (act, delay) => { clearTimeout(wait); wait = setTimeout(act, delay); };
  article.addEventListener("pointerover", ({ target, pointerType }) => {
    const link = target.closest("a[href*='#']:not(.headerlink, .figure-number, .preview *)");
    if (pointerType !== "mouse") return;
    if (link) later(() => { hide(); show(link); }, 200);
    else if (target.closest(".preview")) clearTimeout(wait);
    else if (asked) later(hide, 400);
  });
  article.addEventListener("focusin", ({ target }) => {
    if (!target.matches("a[href*='#']:focus-visible")) return;
    hide();
    show(target);
  });
  article.addEventListener("focusout", hide);
  addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
}

// How to cite a claim or a page: a line below the button, copied where the browser allows it, and an entry of BibTeX.
function citeWhenAsked(article) {
  const said = (name) => document.querySelector(`meta[name="${name}"], meta[property="${name}"]`)?.content;
  const page = said("og:url") ?? location.href.split(/[?#]/)[0].replace(ROOT, "");
  const made = (name, set) => Object.assign(document.createElement(name), set);
  const copied = (text) => navigator.clipboard?.writeText(text).then(() => true, () => false);
  article.addEventListener("click", async ({ target }) => {
    const button = target.closest("button.cite"), card = target.closest(".claim-card");
    if (!button) return;
    const name = card?.id.replace("claim-", ""), what = card ? `claim ${name}` : `“${said("og:title")}”`;
    const address = card ? `${page}#${card.id}` : page, line = `${said("citation")}, ${what}, ${address}`;
    const key = name ?? page.replace(/^.*\/|\.html$/g, ""), tex = `${what}, ${address}`.replace(/[#%&_]/g, "\\$&");
    const entry = said("bibtex").replace(",", `:${key},`).replace(/\n}$/, `,\n  note    = {${tex}}\n}`);
    const below = button.closest("p"), after = below.nextElementSibling;
    const lines = after?.matches(".cited") ? after : made("div", { className: "cited" });
    const value = `${await copied(line) ? "Copied: " : ""}${line}`;
    const again = made("button", { type: "button", textContent: "Copy BibTeX" });
    again.addEventListener("click", async () => { if (await copied(entry)) again.textContent = "Copied BibTeX"; });
    lines.replaceChildren(made("output", { value }), made("output", { value: entry }));
    if (navigator.clipboard) lines.append(again);
    below.after(lines);
  });
}

// The list of chapters keeps the place it was scrolled to; the page one is on comes into sight.
function showCurrent() {
  const list = document.querySelector(".bd-sidebar-primary"), here = list?.querySelector("li.current > a");
  if (!here) return;
  new IntersectionObserver(([{ isIntersecting, boundingClientRect: place, rootBounds: around }], observer) => {
    observer.disconnect();
    if (place.height && !isIntersecting) list.scrollTop += place.top - around.top - around.height / 3;
  }, { root: list, rootMargin: "-15% 0px" }).observe(here);
}

addEventListener("load", showCurrent);
document.addEventListener("DOMContentLoaded", () => {
  const article = document.querySelector("article.bd-article");
  if (article) {
    showPreviews(article);
    citeWhenAsked(article);
  }
  const places = [...document.querySelectorAll(".explorable")];
  if (places.length) loadExplorables(places);
  const form = document.querySelector("form.filter");
  if (form) filterRows(form, [...ledgerRows(), ...glossaryRows()]);
  document.querySelectorAll(".claim-map").forEach(lightNeighbours);
  markScrolling(document.querySelectorAll(BOXES));
  openFolds();
  addEventListener("hashchange", openFolds);
});
