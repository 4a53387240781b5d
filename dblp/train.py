"""One rank of a run: `python -m dblp.train`.

Role and rendezvous come from the environment that torchrun, Slurm and Kubernetes set: RANK (0 is the server, the
others are workers), WORLD_SIZE, MASTER_ADDR and MASTER_PORT. DBLP_CONFIG names the JSON configuration, the same for
all ranks. DBLP_EVENTS, optional, names the Unix socket of a testbed. Exit status: 0 done, 1 failed with one line on
standard error, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dblp.collective import Server, Worker
from dblp.config import Config, Env
from dblp.errors import ConfigError, DblpError
from dblp.events import Events, events_from_environ
from dblp.options import options_from
from dblp.tolerance import policy_from
from dblp.workload import workload_from

INTERRUPTED = 130


def load(environ: Mapping[str, str]) -> tuple[Env, Config]:
    """Read and check everything that the environment names. Raises ConfigError naming variable or key."""
    env = Env.from_environ(environ)
    path = environ.get("DBLP_CONFIG")
    if not path:
        raise ConfigError(("DBLP_CONFIG",), "is not set: the path of the JSON configuration")
    config = Config.load(Path(path))
    options_from(config)
    policy_from(config.transport)
    return env, config


def run(env: Env, config: Config, events: Events) -> None:
    """Serve as rank 0, or work. Raises DblpError. The server loads neither torch nor data."""
    if env.rank == 0:
        say(f"rank 0: {config.name}, port {env.master_port}, waiting for {env.workers} workers")
        Server(env, config, events).run()
        say("rank 0: done")
        return
    workload = workload_from(config, env.rank, env.world_size)
    gc.freeze()  # what was loaded stays: a collection that walks all of torch would stall a round for tens of ms
    with Worker.connect(env, config, workload.tensors, events) as worker:
        workload.run(worker, say)


def say(line: str) -> None:
    """One line on standard output at once, also into a file."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(environ: Mapping[str, str] | None = None) -> int:
    """Run this process's rank; returns the exit status."""
    environ = os.environ if environ is None else environ
    label = f"rank {environ.get('RANK', '?')}"
    events: Events | None = None
    try:
        env, config = load(environ)
        events = events_from_environ(env.rank, environ)
        run(env, config, events)
        events.emit("done", rank=env.rank)
    except DblpError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"dblp.train: {label}: {message}\n")
        _tell(events, environ, message)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        if events is not None:
            events.close()
    return 0


def _tell(events: Events | None, environ: Mapping[str, str], message: str) -> None:
    """Report a failure to the testbed, if one still listens: the failure itself is what counts."""
    if events is not None:
        with contextlib.suppress(DblpError):
            events.emit("error", rank=int(environ["RANK"]), message=message)


if __name__ == "__main__":
    sys.exit(main())
