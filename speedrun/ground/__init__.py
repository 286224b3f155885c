"""What everything stands on: time, errors, logs, files, devices."""
