"""A run, from its settings to its record: compile, train, validate, checkpoint; in one process or several."""
