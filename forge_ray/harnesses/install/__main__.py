"""`python -m forge_ray.harnesses.install NAME…`: installs the programs of harnesses: built-in ones, `all` of them, or `file.py:Class`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from forge_ray.errors import UserError
from forge_ray.harnesses import harness
from forge_ray.harnesses.install.package import INSTALL


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=INSTALL, description="Install harness programs at their pinned versions.")
    parser.add_argument("harness", nargs="+", help=f"{', '.join(harness.BUILT_IN)}, file.py:Class, or all (the built-in ones)")
    given: list[str] = parser.parse_args(arguments).harness
    try:
        for name in dict.fromkeys(name for word in given for name in (harness.BUILT_IN if word == "all" else (word,))):
            adapter = harness.get(name)
            missing = [package for package in adapter.packages() if not package.installed()]
            for package in missing:
                print(f"{name}: getting {package.name} {package.version} from {package.registry}", flush=True)
            adapter.install()
            for package in adapter.packages():
                print(f"{name}: {package.name} {package.version} in {package.folder}", flush=True)
            if not adapter.packages():
                print(f"{name}: nothing to install", flush=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
