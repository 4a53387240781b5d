"""Builds a topology of namespaces, veth pairs and bridges, runs processes in it and tears it down."""

from netem.lab.build import PortPlace, Settings
from netem.lab.lab import Lab
from netem.lab.plan import Host, PlanError
from netem.lab.teardown import CleanReport, Removed, clean

__all__ = ["CleanReport", "Host", "Lab", "PlanError", "PortPlace", "Removed", "Settings", "clean"]
