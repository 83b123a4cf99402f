// Before the first paint, so that a dark page does not flash white. A classic script: modules wait.
"use strict";
(() => {
  const NAMES = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    theme = localStorage.getItem("theme") ?? "auto";
  } catch {
    // A browser that stores nothing follows the system.
  }
  const apply = () => {
    const chosen = NAMES.includes(theme) ? theme : "auto";
    document.documentElement.dataset.theme = chosen;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = chosen[0].toUpperCase() + chosen.slice(1);
      button.setAttribute("aria-label", `Colours: ${chosen}`);
    }
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = NAMES[(NAMES.indexOf(theme) + 1) % NAMES.length];
      try {
        localStorage.setItem("theme", theme);
      } catch {
        // It holds for this page.
      }
      apply();
    });
  });
})();
