"""Bounded-loss gradient transport (DBLP, arXiv 2605.01989) and the training loop that uses it.

The package knows nothing of network namespaces: the same program runs on loopback, in a lab and on a cluster.
"""

__version__ = "0.1.0"
