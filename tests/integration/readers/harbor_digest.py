"""Harbor's own digest of the task directory argv[1]."""

import sys
from pathlib import Path

from harbor.publisher.packager import Packager

print(f"sha256:{Packager.compute_content_hash(Path(sys.argv[1]))[0]}")
