"""All-reduce through one server: workers send up, the server takes the mean, and sends it down."""

from dblp.collective.server import Server
from dblp.collective.worker import Worker

__all__ = ["Server", "Worker"]
