"use strict";
document.documentElement.classList.add("js");

for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keyed = [...table.tBodies[0].rows].map(row => [row.cells[place].dataset.sort, row]);
    const numbers = keyed.every(([key]) => key === "" || !Number.isNaN(Number(key)));
    keyed.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");  // what is not there comes last, either way
      const order = numbers ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
      return down ? -order : order;
    });
    table.tBodies[0].append(...keyed.map(([, row]) => row));
  }));
}

for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = [...document.getElementById(input.dataset.filter).tBodies[0].rows];
  const count = document.querySelector(`[data-count="${CSS.escape(input.dataset.filter)}"]`);
  const texts = rows.map(row => row.textContent.toLowerCase());
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row, place) => { row.hidden = !words.every(word => texts[place].includes(word)); });
    const shown = rows.filter(row => !row.hidden).length;
    count.textContent = shown === rows.length ? `${rows.length} rows` : `${shown} of ${rows.length} rows`;
  });
}

for (const group of document.querySelectorAll("[data-curves]")) {
  const lines = [...group.querySelectorAll(".chart .series")];
  const buttons = [...group.querySelectorAll("button[data-series]")];
  const show = (button, on) => {
    button.setAttribute("aria-pressed", on);
    for (const line of lines) if (line.dataset.series === button.dataset.series) line.classList.toggle("off", !on);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => show(button, button.getAttribute("aria-pressed") !== "true"));
    const light = on => {
      group.classList.toggle("dimmed", on && button.getAttribute("aria-pressed") === "true");
      for (const line of lines) line.classList.toggle("lit", on && line.dataset.series === button.dataset.series);
    };
    button.addEventListener("pointerenter", event => light(event.pointerType === "mouse"));
    button.addEventListener("pointerleave", () => light(false));
  }
  for (const button of group.querySelectorAll("button[data-all]"))
    button.addEventListener("click", () => buttons.forEach(other => show(other, button.dataset.all === "true")));
  const parts = [...group.querySelectorAll("button[data-part]")];
  for (const button of parts) button.addEventListener("click", () => {
    parts.forEach(other => other.setAttribute("aria-pressed", other === button));
    for (const figure of group.querySelectorAll("figure")) {
      const halves = [...figure.querySelectorAll("[data-part]")];
      if (halves.length > 1) halves.forEach(half => { half.hidden = half.dataset.part !== button.dataset.part; });
    }
  });
}
