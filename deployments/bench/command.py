"""The command line of the load generator."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import msgspec
import uvloop

from deployments import settings
from deployments.bench.dialects import Dialect, body
from deployments.bench.prompts import DatasetError, Prompt, dataset, generated

DEFAULT_REQUESTS = 100
DEFAULT_CONCURRENCY = 8


class _Json(click.ParamType[dict[str, object]]):
    name = "json"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, object]:
        if isinstance(value, dict):
            return value
        try:
            return msgspec.json.decode(str(value), type=dict[str, object])
        except msgspec.DecodeError as error:
            self.fail(f"not a JSON object: {error}", param, ctx)


@click.command()
@click.argument("url")
@click.option("--model", help="Default: the one that the server lists, if it is one.")
@click.option("--dialect", type=click.Choice(get_args(Dialect)), default="chat", show_default=True, help="The API.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests per second, sent by the clock.")
@click.option("--concurrency", type=click.IntRange(1), help=f"Clients that each ask and wait. [{DEFAULT_CONCURRENCY}]")
@click.option("--requests", type=click.IntRange(1), help=f"How many. [{DEFAULT_REQUESTS}, or any with --duration]")
@click.option("--duration", type=click.FloatRange(0, min_open=True), help="Seconds for which requests are sent.")
@click.option("--dataset", "dataset_path", type=click.Path(path_type=Path), help="Lines of {prompt or messages}.")
@click.option("--prompt-words", type=click.IntRange(1), default=100, show_default=True, help="Of a made-up prompt.")
@click.option("--shared-words", type=click.IntRange(0), default=0, show_default=True, help="Common to all prompts.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of an answer.")
@click.option("--extra", type=_Json(), default="{}", help="Fields for every body, e.g. '{\"ignore_eos\": true}'.")
@click.option("--api-key", default=settings.client_api_key, show_default="$TOKENYARD_API_KEY", help="Sent with all.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Seconds.")
@click.option("--warm-up", type=click.IntRange(0), default=1, show_default=True, help="Requests before, not counted.")
@click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write all of it there; - is stdout.",
)
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False), help="Write a chart there, as SVG.")
def bench(
    url: str,
    model: str | None,
    dialect: Dialect,
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    duration: float | None,
    dataset_path: Path | None,
    prompt_words: int,
    shared_words: int,
    max_tokens: int,
    extra: dict[str, object],
    api_key: str | None,
    timeout: float,
    warm_up: int,
    seed: int,
    json_path: str | None,
    plot_path: str | None,
) -> None:
    """Load the server at URL and say how long its clients wait. Any OpenAI-compatible server will do.

    With --rate requests are sent by a clock, as users come; with --concurrency the next one waits for an answer. Ctrl-C
    ends the load and reports what there is.
    """
    if rate is not None and concurrency is not None:
        raise click.UsageError("--rate and --concurrency exclude each other.")
    from deployments.bench import client, load, report  # they import aiohttp, which other commands need not wait for

    schedule = load.Schedule(
        rate=rate,
        concurrency=None if rate is not None else concurrency or DEFAULT_CONCURRENCY,
        requests=requests or (None if duration is not None else DEFAULT_REQUESTS),
        duration_s=duration,
        seed=seed,
    )
    server = client.Server(client.base_of(url), dialect, api_key, timeout)
    try:
        asked = _prompts(dataset_path, prompt_words, shared_words, seed)
        model = model or asyncio.run(client.only_model(server))
    except (DatasetError, client.NoModel) as error:
        raise click.ClickException(str(error)) from None
    bodies = (body(dialect, model, prompt, prompt.max_tokens or max_tokens, extra) for prompt in asked)
    outcomes: list[client.Outcome] = []
    length = schedule.requests or round(schedule.duration_s or 0)
    with click.progressbar(length=length, file=sys.stderr, label=f"{model}, {dialect}") as bar:

        def done(outcome: client.Outcome) -> None:
            outcomes.append(outcome)
            elapsed = min(length, int(outcome.due + outcome.end))
            bar.update(1 if schedule.requests is not None else max(0, elapsed - bar.pos))

        async def everything() -> None:
            if warm_up:
                first = load.Schedule(concurrency=1, requests=warm_up)
                await load.run(server, first, bodies, lambda outcome: None)
            await load.run(server, schedule, bodies, done)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(everything())
        except KeyboardInterrupt:
            pass
    found = report.summary(outcomes)
    click.echo(report.words(found), err=json_path == "-")
    if json_path is not None:
        what = {"url": url, "model": model, "dialect": dialect, "schedule": schedule}
        with click.open_file(json_path, "wb") as file:
            file.write(
                msgspec.json.format(msgspec.json.encode({**what, "summary": found, "requests": outcomes})) + b"\n"
            )
    if plot_path is not None and found.answered:
        title = f"{model} at {url}: ms, percentiles of {found.answered} requests"
        Path(plot_path).write_text(report.plot(outcomes, title))
    if not found.answered:
        sys.exit(1)


def _prompts(path: Path | None, words: int, shared_words: int, seed: int) -> Iterator[Prompt]:
    return generated(words, shared_words, seed) if path is None else itertools.cycle(dataset(path))
