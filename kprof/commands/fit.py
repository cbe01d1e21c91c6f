"""`kprof fit`: which models, dtypes and GPUs can keep a time to N tokens, whatever the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer import Option

from kprof.commands import Answer
from kprof.errors import KprofError

if TYPE_CHECKING:
    from kprof.analyze.fit import Fit, Model, Need
    from kprof.device import Device
    from kprof.report.section import Section

Configs = Annotated[
    list[Path],
    typer.Argument(metavar="CONFIG...", help="config.json of Hugging Face, or its folder."),
]
MEANS = {
    "can": "can keep it",
    "not shown": "not shown: faster than any measurement",
    "cannot": "cannot keep it",
    "no memory": "does not fit the memory",
}


def fit(
    configs: Configs,
    target: Annotated[
        str, Option(metavar="TARGET", help="Time to N tokens, as 'ttf64_p99<=100ms'.")
    ] = "ttf64_p99<=100ms",
    prompt: Annotated[int, Option(min=1, metavar="N", help="Tokens of the prompt.")] = 128,
    batch: Annotated[int, Option(min=1, metavar="N", help="Sequences decoded together.")] = 1,
    roofline: Annotated[
        list[Path] | None,
        Option(metavar="FILE", help="Output of kprof roofline --json, of another GPU."),
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the figures as JSON.")] = False,
) -> Answer:
    """Compute which models can keep a time to N tokens, by bytes and FLOPs alone.

    For each model in bf16 and with FP8 weights, on an H100 and an H200 as kprof measured them or
    on the GPUs of --roofline: bytes a token, floor of the time, memory, and the share of the read
    rate that decoding must reach. A target below the floor is out of reach of any kernel.
    """
    from kprof.analyze.fit import DTYPES, measured_gpus
    from kprof.analyze.fit import fit as fit_of

    need = _need_of(target, prompt, batch)
    models = [_read_config(path) for path in configs]
    gpus = [_read_gpu(path) for path in roofline or ()] or list(measured_gpus())
    fits = [fit_of(model, dtype, gpu, need) for model in models for dtype in DTYPES for gpu in gpus]
    encoded = _json_of(need, gpus, fits) if json else None
    last = "next: kprof ab --swap decode YOUR_SCRIPT.py"
    return Answer(f"fit: {need.target}", [_section(need, fits)], encoded, last)


def _need_of(text: str, prompt: int, batch: int) -> Need:
    from kprof.analyze.fit import Need
    from kprof.analyze.sla.targets import parse_target

    target = parse_target(text)
    counts = {"ttf": target.num_tokens, "ttft": 1}
    tokens = counts.get(target.metric.name)
    if tokens is None:
        raise KprofError(
            f"{text!r} is no time to N tokens",
            fix="write it as in 'ttf64_p99<=100ms' or 'ttft_p99<=200ms'",
        )
    return Need(target.text, tokens, target.limit, prompt, batch)


def _read_config(path: Path) -> Model:
    from kprof.analyze.fit import read_model

    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return read_model(name, _read_object(file, "give a config.json of Hugging Face, or its folder"))


def _read_object(file: Path, fix: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise KprofError(f"cannot read {file}: {error.strerror}", fix=fix) from None
    except msgspec.DecodeError as error:
        raise KprofError(f"{file} is no JSON: {error}", fix=fix) from None
    if not isinstance(found, dict):
        raise KprofError(f"{file} holds no JSON object", fix=fix)
    return found


def _read_gpu(path: Path) -> Device:
    from dataclasses import replace

    from kprof.analyze.fit import reading
    from kprof.collect.ceilings import Ceilings

    fix = "write one with: kprof roofline --json > roofline.json"
    try:
        ceilings = msgspec.convert(_read_object(path, fix), Ceilings)
        device, rate = ceilings.as_device(), ceilings.best("DRAM read")
    except (msgspec.ValidationError, ValueError):
        raise KprofError(f"{path} is no output of kprof roofline --json", fix=fix) from None
    if rate is None or "bf16" not in device.flops_per_s:
        raise KprofError(f"{path} has no rate of reading, or none of bf16", fix=fix)
    return replace(reading(device, rate), source=device.source)


def _section(need: Need, fits: list[Fit]) -> Section:
    from kprof.analyze.fit import REACHED_SHARE
    from kprof.report.section import Column, Section, Table, Text
    from kprof.report.units import MISSING, format_memory, format_share, format_time

    columns = (
        Column("Model", "name"),
        Column("Weights"),
        Column("GPU"),
        Column("Verdict"),
        Column("Floor", "right"),
        Column("Share needed", "right"),
        Column("Floor of a token", "right", essential=False),
        Column("Bytes a token", "right", essential=False),
        Column("Memory", "right", essential=False),
    )
    rows = tuple(
        (
            *(one.model, one.dtype, one.gpu, MEANS[one.verdict], format_time(one.floor_ns)),
            MISSING if one.needed_share is None else format_share(one.needed_share),
            *(format_time(one.token_ns), format_memory(one.bytes_per_token)),
            format_memory(one.memory_bytes),
        )
        for one in fits
    )
    able = sum(one.verdict == "can" for one in fits)
    told = f"{able} of {len(fits)} can keep {need.target}: {need.tokens} tokens"
    told += f" behind a prompt of {need.prompt}, batch {need.batch}."
    how = (
        "Floor: prefill, and one read of the weights and the cache for each further token. Share "
        "needed: of the read rate; kprof's decoding reached "
        f"{100 * REACHED_SHARE:.0f} % on an H100."
    )
    return Section("Fit", 0, (Text(told), Table(columns, rows, terminal_rows=40), Text(how)))


def _json_of(need: Need, gpus: list[Device], fits: list[Fit]) -> bytes:
    told = {
        "need": need,
        "gpus": [
            {"name": one.name, "read_bytes_per_s": one.memory_bytes_per_s, "source": one.source}
            for one in gpus
        ],
        "fits": fits,
    }
    return msgspec.json.format(msgspec.json.encode(told))
