"""Calibration text: conversations out of a file or the built-in text, as token sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError

Message = Mapping[str, Any]
_LEAST_TOKENS = 16


def conversations(file: Path | None) -> list[list[Message]]:
    """Conversations as chat messages: from a .jsonl file (a line each, {"messages": [...]} or {"text": "..."}), or from
    a text file, whose paragraphs are taken as turns of user and assistant; None: the built-in text.

    Raises ConfigError for a file that cannot be read as that.
    """
    if file is None:
        return _from_text(files("tfglm.checkpoint").joinpath("data/training_text.txt").read_text(encoding="utf-8"))
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration file {file} cannot be read as UTF-8 text: {error}") from None
    if file.suffix != ".jsonl":
        return _from_text(text)
    result = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            result += _from_line(line, f"{file}, line {number}")
    return result


def _from_line(line: str, where: str) -> list[list[Message]]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return _from_text(entry["text"])
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) and m.get("role") for m in messages):
        raise ConfigError(f'{where}: {{"messages": [{{"role": ..., "content": ...}}]}} or {{"text": ...}} is needed')
    return [messages]


def _from_text(text: str) -> list[list[Message]]:
    """Sections (a line that begins with #) are conversations, their paragraphs turns."""
    result: list[list[Message]] = []
    for paragraph in (part.strip() for part in text.split("\n\n")):
        if not paragraph:
            continue
        if paragraph.startswith("#") or not result:
            result.append([])
        role = "assistant" if len(result[-1]) % 2 else "user"
        result[-1].append({"role": role, "content": paragraph})
    return result


def sequences(
    chats: Sequence[Sequence[Message]],
    render: Callable[[Sequence[Message]], str],
    encode: Callable[[str], list[int]],
    *,
    length: int,
    tokens: int,
) -> list[list[int]]:
    """Token sequences of up to `length`, conversation after conversation, `tokens` in all at most.

    Raises ConfigError when the text is too short to say anything.
    """
    ids: list[int] = []
    for messages in chats:
        ids += encode(render(messages))
        if len(ids) >= tokens:
            break
    ids = ids[:tokens]
    parts = [ids[start : start + length] for start in range(0, len(ids), length)]
    parts = [part for part in parts if len(part) >= _LEAST_TOKENS]
    if not parts:
        raise ConfigError(f"the calibration text has {len(ids)} tokens; at least {_LEAST_TOKENS} are needed")
    return parts
