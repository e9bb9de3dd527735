"""Conformance: real agent programs, driven by a script, through whatever model proxy is put between.

    python -m forge_ray.conformance                                     # our own proxy
    python -m forge_ray.conformance --proxy http://127.0.0.1:4000 …     # another one, see docs/conformance.md

A *program* (Codex, Claude Code …) is run unmodified on a *case*: a script of what the model says, turn by turn. Afterwards the workspace
must hold what the script's commands write, the program must have ended as it is known to, and the proxy's recording, where a *reader* of it
is given, must be exactly the script: every sampled text once, in the right conversation, with the right kind and continuation.

Ours is tested with the scripted engine inside its replica (tokens); another proxy in front of `upstream`, which says the same words.
"""
