"""How answers to prompts are shown: as text, as JSON lines, and their speed in one sentence."""

from __future__ import annotations

import io
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

import typer

from ssmcore.jsonlines import dump_line

if TYPE_CHECKING:
    from ssmcore.cli.batch import Answer
    from ssmcore.engine.requests import RequestOutput

_HEADING = 60


def json_answer(answer: Answer) -> dict[str, Any]:
    """One answer as JSON values; times in seconds."""
    found: dict[str, Any] = {"index": answer.index, "id": answer.request.id}
    output = answer.output
    if output is None:
        return found | {"error": {"code": "request", "message": answer.error}}
    timing, usage = output.timing, output.usage
    logprobs = None
    if output.logprobs is not None:
        logprobs = [
            {
                "token_id": entry.token_id,
                "logprob": entry.logprob,
                "top": [[token, value] for token, value in entry.top],
            }
            for entry in output.logprobs
        ]
    return found | {
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "seed": output.seed,
        "logprobs": logprobs,
        "timing": {
            "queueing_s": _between(timing.arrival, timing.first_scheduled),
            "time_to_first_token_s": _between(timing.arrival, timing.first_token),
            "total_s": _between(timing.arrival, timing.finished),
        },
    }


def _between(first: float, second: float | None) -> float | None:
    return None if second is None else second - first


def shown(text: str, terminal: bool) -> str:
    """Text for standard output; a terminal gets no control characters but ends of lines and tabs.

    A model may generate any byte, an escape sequence among them.
    """
    if not terminal or text.isprintable():
        return text
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) != "Cc"
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


class JsonWriter:
    """Prints a JSON line for each answer."""

    on_text = None

    def write(self, answer: Answer) -> None:
        """Print one answer."""
        sys.stdout.write(dump_line(json_answer(answer)) + "\n")
        sys.stdout.flush()


def _tolerant_stdout() -> bool:
    """Let standard output replace what its encoding has not; whether it is a terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout.isatty()


class TextWriter:
    """Prints the text of each answer under a heading."""

    on_text = None

    def __init__(self) -> None:
        self._terminal = _tolerant_stdout()

    def write(self, answer: Answer) -> None:
        """Print one answer; an error goes to standard error."""
        if answer.output is None:
            _error(f"prompt {answer.index + 1}: {answer.error}")
            return
        start = " ".join((answer.output.prompt or "").split())
        start = start if len(start) <= _HEADING else start[: _HEADING - 1] + "…"
        text = f"==> {answer.index + 1}: {start}\n{answer.output.text}\n\n"
        sys.stdout.write(shown(text, self._terminal))
        sys.stdout.flush()


class StreamWriter:
    """Prints the text of one answer as it comes; a terminal shows the prompt before it, dimmed."""

    def __init__(self) -> None:
        self._terminal = _tolerant_stdout()

    def on_text(self, index: int, text: str) -> None:
        """Print new text."""
        sys.stdout.write(shown(text, self._terminal))
        sys.stdout.flush()

    def prompt(self, text: str) -> None:
        """Show the prompt, on a terminal only."""
        if self._terminal:
            typer.secho(shown(text, True), dim=True, nl=False)

    def write(self, answer: Answer) -> None:
        """End the text, or say what was wrong."""
        if answer.output is None:
            _error(str(answer.error))
            return
        sys.stdout.write("\n")
        sys.stdout.flush()


def _error(message: str) -> None:
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(message, err=True)


class Speed:
    """Counts tokens and times over all answers."""

    def __init__(self) -> None:
        self.outputs = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated = 0
        self._first_waits: list[float] = []
        self._prefill = 0.0
        self._decode = 0.0

    def add(self, output: RequestOutput) -> None:
        """Count one output."""
        timing, usage = output.timing, output.usage
        self.outputs += 1
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.cached_tokens
        self._generated += usage.completion_tokens
        if timing.first_token is None:
            return
        self._first_waits.append(timing.first_token - timing.arrival)
        self._prefill += timing.first_token - timing.arrival
        if timing.finished is not None:
            self._decode += timing.finished - timing.first_token

    def sentence(self, seconds: float) -> str:
        """Rates; of one output each phase by itself, of many all tokens over the whole time."""
        from numpy import median

        if self.outputs == 1:
            prefill, decode = self._prefill, self._decode
            generated = max(0, self._generated - 1)
        else:
            prefill = decode = seconds
            generated = self._generated
        parts = [
            f"{self._prompt_tokens} prompt tokens{_rate(self._prompt_tokens, prefill)}",
            f"{self._generated} generated tokens{_rate(generated, decode)}",
        ]
        if self._cached_tokens:
            parts[0] += f", {self._cached_tokens} of them cached"
        if self._first_waits:
            which = "" if self.outputs == 1 else ", median"
            parts.append(f"first token after {1000 * median(self._first_waits):.0f} ms{which}")
        if self.outputs != 1:
            parts.insert(0, f"{self.outputs} outputs in {seconds:.1f} s")
        return ", ".join(parts)


def _rate(count: int, seconds: float) -> str:
    return f" ({count / seconds:.0f} tokens/s)" if count and seconds > 0 else ""
