// In the search, "--resume" means its words: a hyphen would exclude pages that have them.
document.addEventListener("input", ({ target }) => {
  const words = target.name === "query" && target.value.replace(/(^|\s)-+/g, "$1");
  if (words !== false && words !== target.value) target.value = words;
}, true);
