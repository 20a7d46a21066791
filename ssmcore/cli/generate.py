"""`ssmcore generate`: text from prompts, one or many, to a terminal, a file or another program."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from ssmcore.cli.options import ConfigOption, SetOption, load_settings
from ssmcore.errors import RequestError

if TYPE_CHECKING:
    from ssmcore.cli.prompts import PromptRequest
    from ssmcore.settings import Settings

STDIN = Path("-")


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]...",
            help="Texts to continue; without any, standard input is read.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Read the prompt, or with JSON lines the prompts, from a file (- for standard"
            " input); one line end at its end is not part of the prompt.",
            show_default=False,
        ),
    ] = None,
    jsonl: Annotated[
        bool,
        typer.Option(
            "--jsonl",
            help='Input is JSON lines, {"prompt": ...} or {"prompt_token_ids": [...]} each, with'
            " an id and sampling parameters of its own if wanted; implied by a file's name ending"
            " in .jsonl. Implies --json.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate for a prompt.  [default: 128]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most probable token.  [default: 0]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the K most probable.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the fewest that reach this probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below this share of the best one's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="A text that ends the output; may be repeated.")
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="A token that ends the output; may be repeated.")
    ] = None,
    ignore_eos: Annotated[
        bool | None,
        typer.Option("--ignore-eos", help="Go on after the model's end-of-sequence token."),
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Log-probabilities of each token and of the N best (JSON).")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing on standard error but errors.")
    ] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
) -> None:
    """Continue one or many prompts.

    Text comes to standard output, as it is made if there is one prompt; speed and progress go to
    standard error. The exit status is 1 if a prompt could not be served, 130 after Ctrl-C.
    """
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or None,
        "stop_token_ids": stop_token_id or None,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    from ssmcore.engine.requests import SamplingParams

    defaults = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**defaults)
    if prompts and file is not None:
        raise typer.BadParameter("give either prompts or --file, not both")
    if prompts and jsonl:
        raise typer.BadParameter("--jsonl is for --file and standard input")
    jsonl = jsonl or (file is not None and file.suffix == ".jsonl")
    as_json = as_json or jsonl
    source = _Source(prompts, file, jsonl, defaults)
    settings = load_settings(config, set_)
    raise typer.Exit(_run(source, settings, as_json=as_json, quiet=quiet))


def _run(source: _Source, settings: Settings, *, as_json: bool, quiet: bool) -> int:
    """Answer all prompts; the exit status."""
    from ssmcore.cli.answers import JsonWriter, Speed, StreamWriter, TextWriter
    from ssmcore.cli.batch import Batch
    from ssmcore.cli.interrupt import INTERRUPTED, Interrupt
    from ssmcore.cli.startup import start_engine

    requests = iter(source)
    engine = start_engine(settings, quiet=quiet)
    writer: JsonWriter | TextWriter | StreamWriter
    if as_json:
        writer = JsonWriter()
    elif source.total == 1:
        writer = StreamWriter()
    else:
        writer = TextWriter()
    speed = Speed()
    failed = False
    with Interrupt() as interrupt, _progress(source, quiet) as advance:
        batch = Batch(engine, requests, stop=lambda: interrupt.wanted, on_text=writer.on_text)
        start = time.perf_counter()
        if isinstance(writer, StreamWriter):
            writer.prompt(source.first_text)
        for answer in batch.answers():
            advance()
            writer.write(answer)
            if answer.output is None:
                failed = True
            else:
                speed.add(answer.output)
        seconds = time.perf_counter() - start
    if interrupt.wanted:
        typer.echo("interrupted: what was generated so far is above", err=True)
    if not quiet and speed.outputs:
        typer.echo(speed.sentence(seconds), err=True)
    return INTERRUPTED if interrupt.wanted else int(failed)


class _Source:
    """Where prompts come from.

    Attributes:
        total: how many there are, None where that cannot be known beforehand.
        first_text: the first prompt, where it is text that was read already.

    Raises:
        typer.Exit: with status 2, if a file cannot be read.
    """

    def __init__(
        self,
        prompts: list[str] | None,
        file: Path | None,
        jsonl: bool,
        defaults: Mapping[str, Any],
    ) -> None:
        self._defaults = defaults
        self._file = file
        self._texts = prompts or []
        self.first_text = ""
        self.total: int | None = None
        if jsonl:
            self.total = _count_lines(file)
        elif not prompts:
            self._texts = [_read_text(file)]
        if self._texts:
            self.first_text = self._texts[0]
            self.total = len(self._texts)

    def __iter__(self) -> Iterator[PromptRequest]:
        from ssmcore.cli.prompts import PromptRequest, prompt_of
        from ssmcore.engine.requests import SamplingParams
        from ssmcore.jsonlines import read_lines

        if self._texts:
            params = SamplingParams(**self._defaults)
            for text in self._texts:
                yield PromptRequest(None, text, params)
            return
        with _opened(self._file) as stream:
            for line in read_lines(stream):
                yield prompt_of(line, self._defaults)


@contextmanager
def _opened(file: Path | None) -> Iterator[BinaryIO]:
    if file is None or file == STDIN:
        yield _stdin()
        return
    try:
        stream = file.open("rb")
    except OSError as error:
        typer.echo(f"error: cannot read {file}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from None
    with stream:
        yield stream


def _stdin() -> BinaryIO:
    """Standard input with a buffer of our own: a thread may still read it when Python ends."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except (OSError, ValueError):  # replaced by something that is no file
        return sys.stdin.buffer


def _count_lines(file: Path | None) -> int | None:
    """Lines of a file; None of what can be read but once."""
    if file is None or file == STDIN or not file.is_file():
        return None
    with _opened(file) as stream:
        count = 0
        ended = True
        while block := stream.read(2**20):
            count += block.count(b"\n")
            ended = block.endswith(b"\n")
    return count + (not ended)


def _read_text(file: Path | None) -> str:
    """One prompt: a whole file, or standard input, without the line end at its end."""
    from ssmcore.jsonlines import MAX_LINE_BYTES

    if file is None and sys.stdin.isatty():
        raise typer.BadParameter("no prompt: give one, or --file, or standard input")
    with _opened(file) as stream:
        try:
            data = stream.read(MAX_LINE_BYTES + 1)
        except OSError as error:
            typer.echo(f"error: cannot read {file}: {error.strerror or error}", err=True)
            raise typer.Exit(2) from None
    name = "standard input" if file is None or file == STDIN else str(file)
    if len(data) > MAX_LINE_BYTES:
        raise RequestError(f"{name}: a prompt may have {MAX_LINE_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: not UTF-8: byte {error.start} is {data[error.start]:#04x}"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


@contextmanager
def _progress(source: _Source, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on standard error for many prompts, if that is a terminal and the output is not."""
    if quiet or source.total == 1 or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        "prompts",
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task("prompts", total=source.total)
        yield lambda: progress.advance(task)
