"""A page that shows runs while they train, and afterwards."""

PORT = 3280  #: default, on this machine only
