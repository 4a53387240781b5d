"""Packets that are not the workload's: microbursts of many senders at once, and background traffic."""
