// The ledger's filter, scrolling boxes that the keyboard reaches, figures that move. No library, no network.

function filterLedger(form, rows) {
  const fields = [...form.querySelectorAll("select, input")];
  // Places of the papers, ranges by their members; without the numbers of the book's boxes, which would be taken for
  // them, and without the claims that one rests on.
  const texts = (row) => [...row.cells].map((cell) =>
    (cell.querySelector(".claim-box, .claim-rest") ? cell.firstChild.textContent : cell.innerText));
  const words = new Map(rows.map((row) => [row, [...texts(row), row.dataset.places].join("\n").toLowerCase()]));
  const show = () => {
    const shown = rows.filter((row) => fields.every(({ name, value }) =>
      !value || (name === "text" ? words.get(row).includes(value.toLowerCase()) : row.dataset[name] === value)));
    rows.forEach((row) => { row.hidden = !shown.includes(row); });
    form.querySelector("output").value = `${shown.length} of ${rows.length} claims`;
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

// Everything is measured before anything is changed, or each change would lay the page out anew.
// A box that scrolls sideways can be reached with the keyboard, and says that it goes on.
function markAll() {
  const boxes = [...document.querySelectorAll(BOXES)];
  const scrolls = boxes.map((box) => {
    const wider = box.clientWidth > 0 && box.scrollWidth > box.clientWidth + 4;
    return wider && ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
  });
  boxes.forEach((box, k) => {
    box.classList.toggle("scrolls", scrolls[k]);
    if (scrolls[k]) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  });
}

const BOXES = "article pre, article div.math > math, article .claim-card, article .erratum, "
  + "article :is(figure, div).book-figure, article figure.align-default, article .erratum table, "
  + "article .pst-scrollable-table-container, article .table-wrapper";

// Buttons of the theme are named by what they show, and its lists hold items.
function mendTheme() {
  document.querySelectorAll(".citation-list[role=list] > *").forEach((entry) => entry.setAttribute("role", "listitem"));
  document.querySelectorAll("button[aria-label]").forEach((button) => {
    const shown = button.innerText.trim().replace(/\s+/g, " ");
    if (shown && !button.getAttribute("aria-label").includes(shown)) button.setAttribute("aria-label", shown);
  });
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
      const below = place.bottom + box.offsetHeight < innerHeight || place.top < box.offsetHeight;
      box.style.left = `${Math.max(0, Math.min(place.left - around.left, around.width - box.offsetWidth))}px`;
      box.style.top = `${(below ? place.bottom : place.top - box.offsetHeight) - around.top}px`;
    });
  };
  const later = (act, delay) => { clearTimeout(wait); wait = setTimeout(act, delay); };
  article.addEventListener("pointerover", ({ target, pointerType }) => {
    const link = target.closest("a[href*='#']:not(.headerlink, .figure-number, .preview *)");
    if (pointerType !== "mouse") return;
    if (link) later(() => { hide(); show(link); }, 200);
    else if (target.closest(".preview")) clearTimeout(wait);
    else if (asked) later(hide, 300);
  });
  article.addEventListener("focusin", ({ target }) => { if (target.matches("a[href*='#']:focus-visible")) { hide(); show(target); } });
  article.addEventListener("focusout", hide);
  addEventListener("keydown", ({ key }) => { if (key === "Escape") hide(); });
}

document.addEventListener("DOMContentLoaded", () => {
  const article = document.querySelector("article.bd-article");
  if (article) showPreviews(article);
  const places = [...document.querySelectorAll(".explorable")];
  if (places.length) loadExplorables(places);
  const form = document.querySelector("form.ledger-filter");
  if (form) filterLedger(form, [...document.querySelectorAll("table.ledger tbody tr")]);
  document.querySelectorAll(".claim-map").forEach(lightNeighbours);
  mendTheme();
  markAll();
  addEventListener("resize", markAll);
});
addEventListener("load", markAll);
