"""One process, or several that hold the devices of one mesh together."""

import argparse

import jax


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that :func:`start` reads.

    Args:
      parser: Of the command line.
    """
    group = parser.add_argument_group("processes", "Start the same command once for each process.")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; any free port of its host")
    group.add_argument("--num-processes", type=int, metavar="N", help="how many processes there are")
    group.add_argument("--process-id", type=int, metavar="I", help="which of them this is, from 0")
    group.add_argument("--cluster", action="store_true", help="ask the cluster (Slurm, Open MPI, ...) for these three")
    group.add_argument("--devices", type=int, metavar="N", help="use so many virtual CPU devices in each process")


def start(parsed: argparse.Namespace) -> None:
    """Joins the other processes, if there are any; to be called before anything else of JAX.

    Args:
      parsed: The command line.

    Raises:
      ValueError: For arguments that do not go together; the message names them.
    """
    values = {
        "coordinator": parsed.coordinator,
        "num-processes": parsed.num_processes,
        "process-id": parsed.process_id,
    }
    given = [name for name, value in values.items() if value is not None]
    missing = [name for name, value in values.items() if value is None]
    if given and parsed.cluster:
        raise ValueError(f"cluster: goes without {', '.join(given)}, which the cluster knows")
    if given and missing:
        raise ValueError(f"{missing[0]}: needed with {', '.join(given)}")
    if given:
        _check_range("num-processes", parsed.num_processes, 1)
        _check_range("process-id", parsed.process_id, 0, parsed.num_processes - 1)
    if parsed.devices is not None:
        _check_range("devices", parsed.devices, 1)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", parsed.devices)
    if parsed.cluster or given:
        # For CPU devices; those of GPUs always go through NCCL.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.distributed.initialize(parsed.coordinator, parsed.num_processes, parsed.process_id)
        except ValueError as error:
            if given:
                raise
            raise ValueError(
                f"cluster: JAX found none ({error}) Pass coordinator, num-processes and process-id instead"
            ) from error


def _check_range(name: str, x: int, least: int, most: int | None = None) -> None:
    if x < least or (most is not None and x > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: expected {expected}, got {x}")
