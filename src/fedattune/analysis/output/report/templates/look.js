"use strict";
// Colours and the switch between light and dark. The page's own colours are variables of its style sheet; pictures read
// them from there, and are drawn again when they change.
const Look = (() => {
  // Okabe and Ito's colours, which colour-blind readers tell apart; lines differ in their dashes as well. The dark ones
  // have the same hues and stand out from a dark page.
  const LINES = {
    light: ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a6f00", "#5b4b8a"],
    dark: ["#4da3e0", "#e69f00", "#2bc48f", "#e394c2", "#9bd8fa", "#f07a3a", "#c9ba2e", "#a696e0"],
  };
  const MORE = { // from nothing to most: away from the colour of the page
    light: ["#ffffff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b"],
    dark: ["#12161d", "#142a44", "#163d66", "#1a5288", "#2470b0", "#3f93d0", "#70b4e4", "#a9d3f0", "#e8f4fd"],
  };
  const SIGNED = {
    light: ["#b35806", "#f1a340", "#fee0b6", "#ffffff", "#d8daeb", "#998ec3", "#542788"],
    dark: ["#ffc27a", "#d9822b", "#6b4420", "#12161d", "#3d3763", "#8072bd", "#cfc5ff"],
  };
  const NAMES = ["ink", "soft", "line", "page", "card", "mild", "grey", "red", "grid", "dot", "rest", "unknown", "bar-gain", "bar-loss", "stripe"];
  const colours = {};
  let draw = () => {};

  const rgb = (colour) => [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  function table(stops) { // 256 colours along some stops
    const parts = stops.map(rgb);
    return Array.from({ length: 256 }, (_, i) => {
      const at = i / 255 * (parts.length - 1), k = Math.min(Math.floor(at), parts.length - 2);
      return parts[k].map((c, j) => Math.round(c + (parts[k + 1][j] - c) * (at - k)));
    });
  }
  function read() {
    const theme = document.documentElement.dataset.theme === "dark" && !document.body.classList.contains("printing") ? "dark" : "light";
    const variables = getComputedStyle(document.documentElement);
    NAMES.forEach((name) => { colours[name.replace(/-./, (s) => s[1].toUpperCase())] = variables.getPropertyValue(`--${name}`).trim(); });
    Object.assign(colours, { lines: LINES[theme], more: MORE[theme], signed: SIGNED[theme], moreTable: table(MORE[theme]), signedTable: table(SIGNED[theme]), unknownRgb: rgb(colours.unknown) });
  }
  function show(theme) {
    document.documentElement.dataset.theme = theme;
    read();
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `show the page ${theme === "dark" ? "light" : "dark"}`);
    draw();
  }
  const button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => { try { return localStorage.getItem("fedattune-theme"); } catch { return null; } };
  button.hidden = false;
  button.addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("fedattune-theme", theme); } catch { /* forgotten when the page is closed */ }
    show(theme);
  });
  system.addEventListener("change", () => { if (!stored()) show(system.matches ? "dark" : "light"); });
  // Paper is light: the theme goes back to what it was when printing is done.
  let before = null;
  const print = (on) => {
    if (on === (before !== null)) return;
    const theme = on ? "light" : before;
    before = on ? document.documentElement.dataset.theme : null;
    document.body.classList.toggle("printing", on);
    show(theme);
  };
  show(document.documentElement.dataset.theme ?? "light");

  return { colours, print, onChange: (redraw) => { draw = redraw; } };
})();

// The scale of a heat map. A few weights far above all others must not make the others look alike: where the largest is
// more than twice the end of the others, these get three quarters of the colours, and the outliers the rest.
const Scale = (() => {
  const OTHERS = 0.75, OUTLIER_SHARE = 0.02, FAR = 2, FAINT = 0.05;
  // Outliers are at most a fiftieth of the weights, and fewer than one in every second row: a partner for each is none.
  function make(weights, n) { // for others, of n clients; not finite where not known
    const sorted = weights.map(Math.abs).filter(Number.isFinite).sort((a, b) => b - a), least = FAINT / n;
    const largest = Math.max(sorted[0] ?? 0, least);
    const rank = Math.max(1, Math.floor(Math.min(OUTLIER_SHARE * sorted.length, sorted.length / Math.max(1, n - 1) / 2)));
    const end = Math.max(sorted[Math.min(rank, sorted.length - 1)] ?? 0, least);
    return largest > FAR * end ? { end, largest } : { end: largest, largest };
  }
  function share({ end, largest }, weight) { // of the colours, from 0 to 1
    const w = Math.min(Math.abs(weight), largest);
    if (end === largest) return w / largest;
    return w <= end ? OTHERS * w / end : OTHERS + (1 - OTHERS) * (w - end) / (largest - end);
  }
  return { make, share };
})();
