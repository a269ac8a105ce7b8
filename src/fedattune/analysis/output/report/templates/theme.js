"use strict";
// Before the first paint, so that a dark page does not flash. Storage may be forbidden, above all for files.
{
  let theme = null;
  try { theme = localStorage.getItem("fedattune-theme"); } catch { /* then the system decides */ }
  document.documentElement.dataset.theme = theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}
