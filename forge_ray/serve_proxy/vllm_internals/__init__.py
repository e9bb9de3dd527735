"""Everything that touches vLLM's internals, so that an upgrade of vLLM touches one package. Written against vLLM 0.32.

The rest of the room asks `server` for an app over an engine (`engines`), and knows of both what is named here.
"""

from forge_ray.serve_proxy.vllm_internals.engines import Engine, PauseMode
from forge_ray.serve_proxy.vllm_internals.server import REFUSALS, make_app, make_engine, parse_arguments

__all__ = ["REFUSALS", "Engine", "PauseMode", "make_app", "make_engine", "parse_arguments"]
