"""Harness programs that misbehave, each in its own way, as adapters of a user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from forge_ray.harnesses.harness import Command, Harness, Launch

ASK = """
import json, os, sys, time, urllib.request

def ask():
    body = {"model": "policy", "messages": [{"role": "user", "content": sys.argv[2]}]}
    headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", json.dumps(body).encode(), headers)
    return json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))["choices"][0]["message"]["content"]
"""


class Program(Harness):
    """Runs `code` after the function `ask`."""

    code: ClassVar[str] = "print(ask())"

    def configure(self, launch: Launch) -> Command:
        interpreter = str(Path(sys.executable).resolve())
        return Command(
            argv=(interpreter, "-I", "-S", f"{launch.home}/program.py", launch.openai_url, launch.instruction),
            env={"KEY": launch.key},
            home_files={"program.py": ASK + self.code},
            visible=(sys.base_prefix,),
        )


class Good(Program):
    code = "print(ask()); open('answer.txt', 'w').write('42')"


class CrashesFirst(Program):
    code = "raise RuntimeError('no luck')"


class CrashesLater(Program):
    code = "ask(); os.kill(os.getpid(), 11)"


class NeverCalls(Program):
    code = "print('nothing to do')"


class Hangs(Program):
    code = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
ask()
open('answer.txt', 'w').write('42')
if os.fork() == 0:
    os.setsid()
while True:
    time.sleep(1)
"""


class Daemon(Program):
    """Ends with an answer and leaves a daemon that holds its output open and spoils the workspace later."""

    code = """
print(ask())
open('answer.txt', 'w').write('42')
ready, done = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(done, b'x')
        time.sleep(2)
        open('answer.txt', 'w').write('spoilt')
        time.sleep(3600)
    os._exit(0)
os.read(ready, 1)
"""


class Waits(Program):
    """Calls once, says so, and waits until it is told to go on."""

    code = """
print(ask(), flush=True)
open('answer.txt', 'w').write('42')
while not os.path.exists(GATE):
    time.sleep(0.1)
"""

    def configure(self, launch: Launch) -> Command:
        command = super().configure(launch)
        # The path of a file on the host, told through the instruction's last word.
        gate = launch.instruction.split()[-1]
        files = {name: text.replace("GATE", repr(gate)) for name, text in command.home_files.items()}
        return Command(command.argv, command.env, files, visible=(*command.visible, str(Path(gate).parent)))
