"""Weights that are split over several devices, and graphs that compute with the parts.

`placing` decides where weights are cut and uploads the parts. `sharded_graph` makes of a graph that reads such weights
one with a node for each part (`ways` knows how operations can be cut, `values` how values are spread). `axes` chooses
axes where nobody gave them: for combinations of devices, and for groups of simulated ones.
"""
