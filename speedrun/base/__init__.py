"""The base of all other rooms: time, errors, logs, files, devices."""
