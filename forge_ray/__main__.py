"""`python -m forge_ray`."""

import sys

from forge_ray.cli.main import main

sys.exit(main())
