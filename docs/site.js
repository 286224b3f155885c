// In the search, "--resume" means its words: a hyphen would exclude pages that have them.
document.addEventListener("input", ({ target }) => {
  const words = target.name === "query" && target.value.replace(/(^|\s)-+/g, "$1");
  if (words !== false && words !== target.value) target.value = words;
}, true);
for (const table of document.querySelectorAll("article table")) {
  const names = [...table.querySelectorAll("th")].map((head) => head.textContent);
  if (names.length > 4) table.dataset.many = names.length;
  for (const cell of table.querySelectorAll("td")) cell.dataset.column = names[cell.cellIndex];
}
