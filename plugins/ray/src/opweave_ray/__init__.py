"""The devices of all nodes of a Ray cluster for opweave.

`connect` has Ray start one server of opweave-remote on every node. Work goes over the sockets of opweave-remote, not
through Ray, which starts, places and restarts the servers and tells when a node is lost.
"""

from opweave_ray.cluster import Cluster, connect

__all__ = ["Cluster", "connect"]
