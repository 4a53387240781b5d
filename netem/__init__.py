"""The testbed: topologies, links with controlled loss, experiments, and what comes out of them."""

__version__ = "0.1.0"
