"""What `forge-ray check` says of the call log of a run that is there already."""

from __future__ import annotations

from forge_ray.errors import ForgeRayError
from forge_ray.run_dir import RunDir


def state(run: RunDir) -> tuple[str, bool] | None:
    """What the log holds and what is wrong in it (file and line of each problem), and whether it is in order. None: there is no log.

    Reads and judges every event that has not been compacted into Parquet, which was judged then.
    """
    if not any(run.calls.glob("*")):
        return None
    from forge_ray.trajectories.call_log import CallLogReader

    reader = CallLogReader(run.calls)
    try:
        reader.refresh()
        problems, torn = reader.verify(), reader.torn()
    except ForgeRayError as error:
        return str(error), False
    held = {session for problem in problems for session in problem.sessions}
    parts = [f"{len(reader.sessions())} sessions"]
    if problems:
        parts.append(f"{len(problems)} problem(s), {len(held)} session(s) in quarantine, which are not trained: ")
        parts[-1] += "; ".join(map(str, problems[:5]))
    if torn:
        parts.append(f"{len(torn)} file(s) end in an event that was never whole (nothing is lost): " + "; ".join(map(str, torn[:5])))
    return "; ".join(parts), not problems
