"""Harbor's own validator over each file of the directory argv[1]; prints `{file: errors}` as JSON."""

import json
import sys
from pathlib import Path

from harbor.utils.trajectory_validator import TrajectoryValidator

found = {}
for file in sorted(Path(sys.argv[1]).glob("*.json")):
    validator = TrajectoryValidator()
    valid = validator.validate(file)
    found[file.name] = [] if valid else validator.errors
print(json.dumps(found))
