"""Do the links do what is asked of them? Settings put on a port, numbered packets sent through it, and what came of it.

`settings` says what is tried, `probe` sends and receives, `judges` compare what arrived with what was asked for,
`measure` does it in a lab, `lines` shows it. `dblp-netem doctor --fidelity` prints the table.
"""
