"""What holds for the repository as a whole: light imports, the environment file, the generated pages, the links of all pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from forge_ray import ray_env
from forge_ray.cli import docs
from forge_ray.config import known_keys
from forge_ray.trajectories import call

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "ray", "transformers", "pyarrow", "matplotlib", "pandas")


@pytest.mark.parametrize("modules", ["forge_ray, forge_ray.config, forge_ray.cli.main", "forge_ray.report.html, forge_ray.report.progress"])
def test_light_imports(modules: str) -> None:
    """`--help`, `check` and a report must not wait for torch."""
    code = f"import sys, {modules}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_help_works() -> None:
    done = subprocess.run([sys.executable, "-m", "forge_ray.cli.main", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "train" in done.stdout


def test_the_environment_file_is_the_table() -> None:
    """As a shell reads it: `set -a; . cluster/ray.env`."""
    command = 'set -a; . "$1"; env -0'
    done = subprocess.run(
        ["sh", "-c", command, "sh", str(ROOT / "cluster" / "ray.env")], capture_output=True, env={"PATH": os.defpath}, check=True
    )
    variables = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
    assert {name: value for name, value in variables.items() if name.startswith("RAY_")} == ray_env.CLUSTER


def test_the_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check", "--directory", str(ROOT / "docs")]) == 0, capsys.readouterr().out


def test_a_stale_page_is_found_and_written(tmp_path: Path) -> None:
    (tmp_path / "outcomes.md").write_text("old")
    assert docs.main(["--check", "--directory", str(tmp_path)]) == 1
    assert (tmp_path / "outcomes.md").read_text() == "old"
    assert docs.main(["--directory", str(tmp_path)]) == 0
    assert docs.main(["--check", "--directory", str(tmp_path)]) == 0


def test_every_key_of_the_config_is_documented() -> None:
    assert [key for key, text in known_keys().items() if not text.strip()] == []
    page = (ROOT / "docs" / "configuration.md").read_text()
    missing = [key for key in known_keys() if f"`{key}`" not in page.replace("harnesses[].", "harnesses.").replace(".<name>.", ".")]
    assert [key for key in missing if not key.endswith((".path", ".options"))] == [], "a source's own keys are explained in the text"


def test_the_recording_page_names_every_event() -> None:
    page = (ROOT / "docs" / "recording.md").read_text()
    for event in ("session", "open", *call.END_EVENTS, "delivered", "undelivered", "kind", "refused", "upstream"):
        assert f"`{event}`" in page


PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r'(?:\]\(|src=")([^)"\s]+)', text)
    for target in targets:
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert "://" in target or (found.exists() and (not anchor or anchor in anchors(found))), target
    assert targets or page.name != "README.md"
