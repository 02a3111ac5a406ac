"""The checkpoint's own chat template, rendered in a jinja2 sandbox the way `transformers` renders it.

Source of the environment's rules: the "chat templating" pages of Hugging Face transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tfglm.checkpoint.jsonfile import read_object
from tfglm.errors import CheckpointError


class TemplateRefusedError(ValueError):
    """The template cannot render these messages; the message is the template's own."""


class ChatTemplate:
    """A compiled template. `variables` are the special tokens that tokenizer_config.json names."""

    def __init__(self, source: str, variables: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._variables = dict(variables or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """chat_template.jinja of a checkpoint, else `chat_template` of its tokenizer_config.json.

        Raises CheckpointError when there is neither, when it cannot be read or when it does not compile.
        """
        config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_object(config_path, CheckpointError) if config_path.exists() else {}
        if template_path.exists():
            name, source = template_path.name, _text(template_path)
        else:
            name, source = config_path.name, _embedded_template(config)
        if not source:
            raise CheckpointError(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")
        try:
            return cls(source, _special_tokens(config))
        except TemplateSyntaxError as error:
            raise CheckpointError(f"{folder / name}: line {error.lineno}: {error.message}") from None
        except RecursionError:
            raise CheckpointError(f"{folder / name}: the template nests too deep to be compiled") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. Raises TemplateRefusedError for whatever goes wrong inside the template."""
        scope = {**self._variables, **(variables or {})}
        scope |= {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(scope)
        except TemplateError as error:
            raise TemplateRefusedError(error.message or type(error).__name__) from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            # A template is a program fed with the client's data: its mistakes are answers about the request.
            raise TemplateRefusedError(f"{type(error).__name__}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from None


def _embedded_template(config: Mapping[str, Any]) -> str:
    """`chat_template`: a template, or a list of named ones; "" for anything else."""
    stored = config.get("chat_template")
    if isinstance(stored, list):
        named = [entry for entry in stored if isinstance(entry, dict) and entry.get("name") == "default"]
        stored = named[0].get("template") if named else ""
    return stored if isinstance(stored, str) else ""


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
