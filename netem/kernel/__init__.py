"""Kernel objects, one module each: namespaces, veth pairs, bridges, offloads, sockets, processes, captures.

Everything here runs as root, touches named network namespaces only, and never the root namespace's links or sysctls.
"""
