"""Runs a config: `python -m opd_jax.main --config=configs/quickstart.py --workdir=runs/quickstart`.

This file only reads flags and starts the pipeline, so that everything else can be imported and
tested. Any field of a config can be set on the command line, e.g. `--config.seed=1` or
`--config.stages.merge.steps=20`. Starting again with the same workdir goes on where it stopped.
"""

import logging as stdlib_logging
import os
import sys

from absl import app, flags, logging
from ml_collections import config_flags

from opd_jax import config as config_lib
from opd_jax import pipeline, train
from opd_jax.infra import distributed

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Path of a config file.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory for everything that the run writes.")


def main(argv: list[str]) -> None:
    """Parses the config, prepares the machine, runs the pipeline, prints the summary."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument(s): {' '.join(argv[1:])}")
    quieten_libraries()
    try:
        experiment = config_lib.parse(_CONFIG.value)
        machine = experiment.runtime
        distributed.start(
            machine.multihost, coordinator=machine.coordinator, processes=machine.processes,
            process=machine.process, patience=machine.host_timeout,
        )  # fmt: skip
        distributed.require_platform(machine.platform or None)
        distributed.enable_compilation_cache(machine.compilation_cache or None)
        if summary := pipeline.run(experiment, _WORKDIR.value):
            print(summary)
    except train.Stopped:
        logging.warning("stopped on request; start again with the same --workdir to go on")
    except (ValueError, OSError, RuntimeError, train.NonFiniteError) as error:
        logging.debug("traceback", exc_info=True)
        distributed.leave(error)
        sys.exit(f"error: {error}")
    except Exception as error:
        distributed.leave(error)
        raise


def quieten_libraries() -> None:
    """Drops what other libraries tell about every file they write; their warnings stay."""
    handler, ours = logging.get_absl_handler(), os.path.dirname(os.path.abspath(__file__))
    handler.addFilter(lambda r: r.pathname.startswith(ours) or r.levelno >= stdlib_logging.WARNING)


def parse_flags(argv: list[str]) -> list[str]:
    """absl's parser; errors of overrides become one line without a traceback."""
    try:
        return app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError, TypeError, OSError) as error:
        reason = error
        while isinstance(reason, Exception) and reason.args and not isinstance(reason, OSError):
            reason = reason.args[0]
        sys.exit(f"error: command line: {' '.join(str(reason).split())}")


def cli() -> None:
    """Entry point."""
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=parse_flags)


if __name__ == "__main__":
    cli()
