"""A page that trains a recipe in the reader's browser, in one tab or in several: a demonstration, never in a record."""
