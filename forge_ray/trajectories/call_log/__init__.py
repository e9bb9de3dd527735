"""The call log: a durable writer and an incremental reader of the events that `forge_ray.trajectories.call` describes."""

from forge_ray.trajectories.call_log.errors import CallLogCorrupt, CallLogError
from forge_ray.trajectories.call_log.reader import CallLogReader
from forge_ray.trajectories.call_log.state import SessionState
from forge_ray.trajectories.call_log.writer import CallLogWriter

__all__ = ["CallLogCorrupt", "CallLogError", "CallLogReader", "CallLogWriter", "SessionState"]
