"""Graphs on hardware that is not there: simulated devices and clusters."""
