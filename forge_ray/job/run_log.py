"""`run.log`, the driver's log: when it was started, what the terminal showed, warnings of every library, and how it ended.

A resumed run adds to it. What nobody foresaw ends in one line on the terminal; its traceback is here, as is that of every other failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from forge_ray import __version__
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.job.runtime import RunFailed
from forge_ray.run_dir import RunDir

log = logging.getLogger(__name__)

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextlib.contextmanager
def run_log(run: RunDir) -> Iterator[None]:
    """Write the process's log into the run's while the body runs. Raises `RunFailed` for what is no error of ours."""
    logging.basicConfig(filename=run.log, level=logging.INFO, format=FORMAT, force=True)
    logging.raiseExceptions = False  # on a full disk each line would put a traceback on the terminal
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line per request
    log.info("forge-ray %s, process %d: %s", __version__, os.getpid(), " ".join(sys.argv))
    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.info("ended: stopped by a signal")
        raise
    except UserError as error:
        log.error("ended: refused: %s", error)
        raise
    except ForgeRayError as error:
        log.error("ended: failed: %s", error, exc_info=True)
        raise
    except Exception as error:
        log.exception("ended: unexpected error")
        last = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RunFailed(f"{type(error).__name__}: {last[-1][:300] if last else 'no message'}; the traceback is in {run.log}") from error
    log.info("ended: complete")
