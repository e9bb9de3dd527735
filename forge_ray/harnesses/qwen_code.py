"""Adapter of Qwen Code (`qwen`), which speaks the chat dialect, streamed.

It cuts its own cap on a reply to what its estimate leaves of the window, and asks again with a larger one when a reply is cut, unless the
run has a cap. Its last event is a `result`, whose error is the model API's where it begins so; the exit code is 1 then.
"""

from __future__ import annotations

from typing import Any, ClassVar

from forge_ray.harnesses.gemini_family import GeminiFamily, GeminiFamilyOptions
from forge_ray.harnesses.harness import About, Command, Launch, Options
from forge_ray.harnesses.install.npm import NpmPackage, node

QWEN = NpmPackage("@qwen-code/qwen-code", "0.24.4", ".bin/qwen")


class QwenCodeOptions(GeminiFamilyOptions):
    """Options of `qwen_code`."""


class QwenCode(GeminiFamily):
    Options: ClassVar[type[Options]] = QwenCodeOptions
    options: QwenCodeOptions
    about = About(
        program="Qwen Code (Alibaba)",
        dialects=("chat",),
        streams=True,
        key="`Authorization: Bearer`",
        subagents="`agent`, in the background; no header, another system prompt and first message",
        traps="Strips white space at the ends of reasoning. After a cut stream it keeps the part and asks to go on.",
        megabytes=152,
        install_s=7,
        first_request_s=1.6,
    )

    def packages(self) -> tuple[NpmPackage, ...]:
        return node(), QWEN

    def configure(self, launch: Launch) -> Command:
        argv = [str(node().executable), str(QWEN.executable), "--yolo", "--auth-type", "openai", "-o", "stream-json"]
        env = {"OPENAI_API_KEY": launch.key, "OPENAI_BASE_URL": launch.openai_url, "OPENAI_MODEL": launch.model}
        env["QWEN_CODE_SUPPRESS_YOLO_WARNING"] = "1"
        if launch.max_output is not None:
            env["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(launch.max_output)
        return self.command(launch, argv, env, ".qwen", self._settings(launch))

    def _settings(self, launch: Launch) -> dict[str, Any]:
        return {
            "security": {"auth": {"selectedType": "openai"}},
            "model": {"generationConfig": {"contextWindowSize": launch.context_window}},
        }
