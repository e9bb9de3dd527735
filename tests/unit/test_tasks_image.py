"""The part of a Dockerfile that a sandbox without images honours."""

from __future__ import annotations

import os
from pathlib import Path

from forge_ray.tasks.image import Image, lay_out, parse_dockerfile
from forge_ray.tasks.task import load_task
from tests.task_maker import make_task

FILES = {"a.txt": "A", "b.txt": "B", "tree/x/y.txt": "Y", "run.sh": "#!/bin/sh\n"}


def parsed(tmp_path: Path, text: str, workdir: str | None = None) -> Image:
    for name, content in FILES.items():
        path = tmp_path / "environment" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    file = tmp_path / "environment" / "Dockerfile"
    file.write_text(text)
    return parse_dockerfile(file, workdir)


def test_the_image_it_begins_with_is_noted(tmp_path: Path) -> None:
    pinned = f"debian@sha256:{'0' * 64}"
    assert parsed(tmp_path, f"FROM --platform=linux/amd64 {pinned} AS Build\nRUN make\nFROM build\n").base == pinned
    assert parsed(tmp_path, "FROM a AS one\nFROM b\n").base == "b" and parsed(tmp_path, "WORKDIR /w\n").base is None


def laid_out(image: Image, place: Path) -> dict[str, str]:
    place.mkdir()
    lay_out(image, place)
    return {str(path.relative_to(place)): path.read_text() for path in sorted(place.rglob("*")) if path.is_file()}


def test_copies_land_where_docker_puts_them(tmp_path: Path) -> None:
    image = parsed(
        tmp_path,
        """
        # a comment
        FROM debian:12 AS base
        WORKDIR /app
        COPY a.txt .
        COPY a.txt b.txt sub/
        COPY --chown=1000:1000 ["a.txt", "name with space.txt"]
        COPY tree /app/copied
        ADD tree/ deep/er/
        copy \\
          # in between
          *.txt \\
          globbed/
        WORKDIR data
        COPY a.txt ./
        WORKDIR /app
        CMD ["bash"]
        """.replace("\n        ", "\n"),
    )
    assert image.unsupported == () and image.workdir == "/app"
    assert laid_out(image, tmp_path / "out") == {
        "a.txt": "A",
        "sub/a.txt": "A",
        "sub/b.txt": "B",
        "name with space.txt": "A",
        "copied/x/y.txt": "Y",
        "deep/er/x/y.txt": "Y",
        "globbed/a.txt": "A",
        "globbed/b.txt": "B",
        "data/a.txt": "A",
    }


def test_variables_and_modes(tmp_path: Path) -> None:
    image = parsed(
        tmp_path,
        'FROM x\nENV A=1 B="two words" DIR=/srv/w\nENV OLD the whole rest\n'
        'ENV PATH="$DIR/bin:${PATH}" C=${NONE:-c} D=\\$A\nWORKDIR ${DIR}\n'
        "COPY --chmod=750 run.sh bin/run\n",
    )
    assert image.unsupported == () and image.workdir == "/srv/w"
    assert image.env["B"] == "two words" and image.env["OLD"] == "the whole rest" and image.env["C"] == "c"
    assert image.env["PATH"].startswith("/srv/w/bin:/usr/local/sbin:")
    laid_out(image, tmp_path / "out")
    assert (tmp_path / "out" / "bin" / "run").stat().st_mode & 0o777 == 0o750


def test_everything_else_is_named_with_its_line(tmp_path: Path) -> None:
    image = parsed(
        tmp_path,
        "FROM x\nRUN pip install jq\nUSER app\nARG V=1\nCOPY a.txt /etc/a\nCOPY ../secret .\nCOPY nothing.txt .\nADD https://x/y .\n"
        "ADD z.tar.gz .\nCOPY --from=base /x .\nCOPY *.md .\nRUN <<EOF\nCOPY a.txt\n",
    )
    lines = dict(line.removeprefix("Dockerfile:").split(": ", 1) for line in image.unsupported)
    assert set(lines) == {"2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13"}
    assert lines["2"] == "RUN pip install jq" and "/etc/a" in lines["5"] and "no such file" in lines["6"] + lines["7"]
    assert image.copies == ()


def test_the_context_is_not_left_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "environment").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "environment" / "link").symlink_to("../secret")
    image = parsed(tmp_path, "FROM x\nWORKDIR /w\nCOPY link .\n")
    assert image.copies == () and "outside of environment/" in image.unsupported[0]


def test_task_toml_wins_over_the_last_workdir(tmp_path: Path) -> None:
    image = parsed(tmp_path, "FROM x\nWORKDIR /app/src\nCOPY a.txt .\n", workdir="/app")
    assert image.workdir == "/app" and laid_out(image, tmp_path / "out") == {"src/a.txt": "A"}


def test_links_in_a_copied_tree_stay_links_and_later_files_replace_them(tmp_path: Path) -> None:
    image = parsed(tmp_path, "FROM x\nWORKDIR /w\nCOPY tree .\nCOPY a.txt link\n")
    os.symlink("/etc/passwd", tmp_path / "environment" / "tree" / "link")
    os.symlink("x/y.txt", tmp_path / "environment" / "tree" / "kept")
    files = laid_out(image, tmp_path / "out")
    assert files["link"] == "A" and os.readlink(tmp_path / "out" / "kept") == "x/y.txt"


def test_a_loaded_task_carries_its_files(tmp_path: Path) -> None:
    dockerfile = "FROM x\nWORKDIR /workspace\nCOPY files/ ./\nENV LANGUAGE=en\n"
    directory = make_task(tmp_path / "t", dockerfile=dockerfile, environment={"files/in.csv": "1,2\n"})
    task = load_task(directory)
    assert task.unsupported() == [] and task.env == {"LANGUAGE": "en"}
    assert laid_out(task.image, tmp_path / "out") == {"in.csv": "1,2\n"}
