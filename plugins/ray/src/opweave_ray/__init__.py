"""The devices of all nodes of a Ray cluster for opweave.

`connect` has Ray start one server of opweave-remote on every node. Work goes over the sockets of opweave-remote, not
through Ray, which starts the servers, one on each node, and reports when one has ended.
"""

from opweave_ray.cluster import Cluster, connect

__all__ = ["Cluster", "connect"]
