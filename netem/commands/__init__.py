"""The commands of the command line, one file each or a few that belong together.

A command is a function that Typer calls: it returns the exit status, prints results to standard output and raises for
everything that went wrong; `netem.cli` turns what it raises into a message and a status. Imports that take time are
inside the functions.
"""
