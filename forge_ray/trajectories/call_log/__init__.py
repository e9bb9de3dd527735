"""The call log: a durable writer, a compactor, and a reader of the events that `forge_ray.trajectories.call` describes."""

from forge_ray.trajectories.call_log.errors import CallLogError
from forge_ray.trajectories.call_log.problems import Problem, TornTail
from forge_ray.trajectories.call_log.reader import CallLogReader
from forge_ray.trajectories.call_log.state import SessionState
from forge_ray.trajectories.call_log.writer import CallLogWriter

__all__ = ["CallLogError", "CallLogReader", "CallLogWriter", "Problem", "SessionState", "TornTail"]
