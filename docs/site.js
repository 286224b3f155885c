// In the search, "--resume" means its words: a hyphen would exclude pages that have them.
document.addEventListener("input", ({ target }) => {
  if (target.name === "query") target.value = target.value.replace(/(^|\s)-+/g, "$1");
}, true);
