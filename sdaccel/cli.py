"""The command line: ``sdaccel COMMAND``, ``python -m sdaccel COMMAND``.

Results go to stdout (with --json as JSON and nothing else), all else to stderr. Each command imports what it needs
when it runs, so that ``--help`` and ``list`` answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import sdaccel
from sdaccel import console, settings
from sdaccel.console import DIFFERS, FAULT, OK
from sdaccel.errors import SettingError
from sdaccel.resources import expanded

if TYPE_CHECKING:
    from sdaccel.engine.store import Entry, Store
    from sdaccel.listing import Listed
    from sdaccel.profile import ImageProfile

app = typer.Typer(
    name="sdaccel",
    help="Stable Diffusion through engines: faster than plain torch, same images.",
    epilog=console.EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
lora = typer.Typer(
    help="Look into LoRA files and their relatives.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(lora, name="lora")

# Options that several commands share.
ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A diffusers folder or a .safetensors file. Default: SDACCEL_MODEL, else the demo."),
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", metavar="FOLDER", help="Where engines are kept. Default: SDACCEL_STORE.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="Who runs engines. Default: SDACCEL_BACKEND, else auto."),
]
ResOption = Annotated[
    list[str] | None,
    typer.Option(
        "--res", metavar="SIZE", help="1024, 832x1216 (width x height) or 512-1024; repeat for more profiles."
    ),
]
BatchOption = Annotated[
    list[str] | None, typer.Option("--batch", metavar="N", help="Images at once: 2 or 1-4. Default: 1-4.")
]
TokensOption = Annotated[
    list[str] | None,
    typer.Option("--tokens", metavar="N", help="Prompt tokens, 77 a chunk: 77 or 77-231 (default)."),
]
ComponentOption = Annotated[
    list[str] | None,
    typer.Option("--component", metavar="NAME", help="unet, vae_decoder, vae_encoder, text_encoder, text_encoder_2."),
]
PickleOption = Annotated[
    bool, typer.Option("--allow-pickle", help="Also open .ckpt, .bin and .pt, reading plain tensors only.")
]
TokenizerOption = Annotated[
    Path | None, typer.Option("--tokenizer", metavar="FOLDER", help="For a single file: vocab.json and merges.txt.")
]
VariantOption = Annotated[
    str | None, typer.Option("--variant", metavar="NAME", help="Which weights of a folder, such as fp16.")
]

VaeOption = Annotated[
    Path | None, typer.Option("--vae", metavar="PATH", help="A VAE's folder or file, for a model without or instead.")
]
PredictionOption = Annotated[
    str | None,
    typer.Option("--prediction-type", metavar="NAME", help="epsilon or v_prediction, where a file is silent."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sdaccel {sdaccel.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# ---- commands, in the order of a first day


@app.command()
def quickstart(
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The image (.png).")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Build the demo model's engines, draw an image, check it and compare it with torch. Needs no network."""
    from sdaccel.progress import terminal_progress
    from sdaccel.quickstart import quickstart as run_quickstart

    with terminal_progress(enabled=console.bar(as_json)) as progress:
        found = run_quickstart(_store(store), path=output, progress=progress)
    if as_json:
        console.print_json(found.to_json())
        return OK if found.ok else DIFFERS
    built = (
        f"{found.built} engines built in {found.build_seconds:.0f} s" if found.built else "engines were there already"
    )
    print(f'"{found.prompt}", drawn by engines: {built}')
    console.print_lines(found.report)
    ratio = found.torch_seconds / found.seconds
    print(f"engines {found.seconds:.2f} s, torch {found.torch_seconds:.2f} s: {ratio:.2f} times as fast")
    print(f"equal to torch's image up to a PSNR of {found.psnr:.1f} dB")
    print(f"the image shows its prompt: {'yes' if found.shown else 'no: ' + '; '.join(found.reasons)}")
    if found.path.exists():
        print(f"image: {found.path}")
    if found.ok:
        print(f'next: sdaccel generate "a yellow star on a black background" --res {_QUICK_SIDE} -o star.png')
        print("      sdaccel build path/to/model.safetensors --res 512")
    return OK if found.ok else DIFFERS


_QUICK_SIDE = 256


@app.command()
def build(
    model: ModelArgument = None,
    res: ResOption = None,
    batch: BatchOption = None,
    tokens: TokensOption = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="A shipped set of profiles, or a .toml file.")
    ] = None,
    component: ComponentOption = None,
    precision: Annotated[
        str | None, typer.Option("--precision", metavar="NAME", help="Default: the backend's own (fp32 on CPU).")
    ] = None,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the comparison of each engine with torch.")
    ] = False,
    timing_cache: Annotated[
        Path | None,
        typer.Option("--timing-cache", metavar="FILE", help="Times to use and add to; made if it is not there."),
    ] = None,
    store: StoreOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> int:
    """Build the engines of a model that the store does not hold yet."""
    from sdaccel.backends.base import pick_backend
    from sdaccel.builder import BuilderConfig, build_engines, buildable_components, built_elsewhere, engines_here
    from sdaccel.listing import list_engines
    from sdaccel.progress import terminal_progress

    place = _store(store)
    checkpoint = _open(model, allow_pickle, variant, vae, prediction_type)
    profiles = _profiles(checkpoint, res, batch, tokens, preset)
    config = BuilderConfig(
        tuple(component) if component else None, profiles, precision, _backend(backend), not no_check, timing_cache
    )
    before = {entry.key: entry.manifest for entry in place.list()}
    chosen = pick_backend(config.backend)
    for name in buildable_components(checkpoint, config.components):
        other = (
            None if engines_here(checkpoint, name, chosen, place) else built_elsewhere(checkpoint, name, chosen, place)
        )
        if other is not None:
            console.say(f"{other}: it is built again")
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        entries = build_engines(checkpoint, config, place, progress)
    keys = [entry.key for entry in entries]
    items = sorted((item for item in list_engines(place) if item.key in keys), key=lambda item: keys.index(item.key))
    built = {entry.key for entry in entries if before.get(entry.key) != entry.manifest}
    if as_json:
        console.print_json([{**item.to_json(), "built": item.key in built} for item in items])
        return OK
    rows = []
    for item in items:
        assert item.entry is not None
        took = _built_in(item.entry) if item.key in built else "was there"
        rows.append([item.entry.engine.component, *_id_and_profiles(item), *_sizes(item), took, _error(item)])
    console.print_table(["component", "id", "profiles", "size", "shared", "built in", "error"], rows)
    return OK


@app.command("list")
def list_(store: StoreOption = None, as_json: JsonOption = False) -> int:
    """List the engines in the store, and whether they will be used on this machine as it is now."""
    from sdaccel.listing import age_text, list_engines

    place = _store(store)
    items = list_engines(place)
    if as_json:
        console.print_json([item.to_json() for item in items])
        return OK
    if not items:
        print(f"no engines in {place.root}")
        console.say("Run: sdaccel build")
        return OK
    rows = []
    for item in items:
        state = f"{item.state}: {item.reason}" if item.reason else item.state
        if item.entry is None:
            rows.append(["?", *_id_and_profiles(item), "", "", "", "", *_sizes(item), "", state])
            continue
        engine = item.entry.engine
        facts = [engine.model, engine.family, engine.precision, engine.backend, *_sizes(item)]
        rows.append([engine.component, *_id_and_profiles(item), *facts, age_text(engine.created), state])
    names = ["component", "id", "profiles", "model", "family", "precision", "backend", "size", "shared", "age", "state"]
    console.print_table(names, rows)
    return OK


@app.command()
def inspect(
    what: Annotated[
        str, typer.Argument(metavar="ID|all|MODEL", help="An engine's id, all of them, or a model's path.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.")] = None,
    times: Annotated[bool, typer.Option("--times/--no-times", help="Measure operators for the page.")] = True,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show what engines are made of, or what a model file holds."""
    from sdaccel.listing import BROKEN, READY, list_engines, select

    place = _store(store)
    if what != "all" and _is_there(what):
        if html is not None:
            raise SettingError("--html is for engines, not for a model.", hint="Name an engine's id, or all.")
        return _inspect_model(_open(what, allow_pickle, variant, vae, prediction_type), as_json)
    items = list_engines(place)
    if what != "all":
        keys = select(place, [what])
        items = [item for item in items if item.key in keys]
    if html is not None:
        from sdaccel.page import engines_page

        if not items:
            raise SettingError(f"there is no engine in {place.root} to make a page of.", hint="Run: sdaccel build")
        measured = {}
        if times:
            from sdaccel.bench import op_times

            for item in items:
                if item.entry is not None and item.state == READY:
                    console.say(f"measuring {item.entry.engine.component} {item.key[:12]}")
                    found = op_times(item.entry, place)
                    measured.update({item.key: found} if found else {})
        console.write_text(html, engines_page(items, measured))
        console.say(f"written: {html}")
    if as_json:
        console.print_json([_engine_json(item) for item in items])
    elif html is None:
        for item in items:
            _print_engine(item)
    return DIFFERS if any(item.state == BROKEN for item in items) else OK


@app.command()
def rm(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Engines, by id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every engine, its weights and graphs.")] = False,
    broken: Annotated[bool, typer.Option("--broken", help="What is damaged or unfinished.")] = False,
    unused: Annotated[bool, typer.Option("--unused", help="What this machine will not use as it is now.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Remove engines, then the weights and graphs that no other engine uses."""
    from sdaccel.listing import BROKEN, READY, list_engines, select, size_text

    if not ids and not (everything or broken or unused):
        raise SettingError("nothing to remove was named.", hint="Name ids, or use --all, --broken or --unused.")
    place = _store(store)
    keys = select(place, ids or [])
    for item in list_engines(place) if everything or broken or unused else []:
        if everything or (broken and item.state == BROKEN) or (unused and item.state != READY):
            keys.append(item.key)
    keys = list(dict.fromkeys(keys))
    if keys and not yes:
        if as_json or not sys.stdin.isatty():
            raise SettingError(f"{len(keys)} engines would be removed.", hint="Add --yes to do it without asking.")
        if not typer.confirm(f"Remove {len(keys)} engines from {place.root}?", err=True):
            console.say("Nothing was removed.")
            return FAULT
    freed = sum(place.remove(key) for key in keys)
    if place.root.is_dir() and (everything or broken or unused):
        place.sweep()
        damaged = [(item.kind, item.key) for item in place.broken() if item.kind != "engines"]
        freed += place.collect(0.0, damaged) if everything or unused else place.collect(also=damaged)
    if as_json:
        console.print_json({"removed": keys, "freed_bytes": freed})
    else:
        print(f"{len(keys)} engines removed, {size_text(freed)} freed")
    return OK


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Default: SDACCEL_MODEL, else the demo.")
    ] = None,
    negative: Annotated[str, typer.Option("--negative", metavar="TEXT", help="What not to draw.")] = "",
    res: Annotated[str | None, typer.Option("--res", metavar="SIZE", help="512 or 832x1216 (width x height).")] = None,
    width: Annotated[int | None, typer.Option("--width", metavar="PIXELS")] = None,
    height: Annotated[int | None, typer.Option("--height", metavar="PIXELS")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N")] = 20,
    guidance: Annotated[
        float | None, typer.Option("--guidance", metavar="SCALE", help="Default: 7.5; 5 for SDXL and the demo.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Of the first image; default: random.")
    ] = None,
    count: Annotated[int, typer.Option("--n", "-n", metavar="N", help="How many images, with seeds in a row.")] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", metavar="NAME", help="euler, euler-a, ddim, dpm++2m, unipc, lcm, ..."),
    ] = None,
    image: Annotated[Path | None, typer.Option("--image", metavar="FILE", help="An image to start from.")] = None,
    strength: Annotated[float, typer.Option("--strength", metavar="0..1", help="How far to leave that image.")] = 0.8,
    mask: Annotated[Path | None, typer.Option("--mask", metavar="FILE", help="White where to draw anew.")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="FILE[:STRENGTH]", help="A LoRA or one of its relatives. May be repeated."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="{seed} and {index} in it are filled in.")
    ] = Path("image-{seed}.png"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files.")] = False,
    build: Annotated[
        str, typer.Option("--build", metavar="WHEN", help="never, or if-missing: build engines for this size first.")
    ] = "if-missing",
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Draw in plain torch.")] = False,
    tokenizer: TokenizerOption = None,
    no_fallback: Annotated[bool, typer.Option("--no-fallback", help="Fail rather than run anything in torch.")] = False,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    store: StoreOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> int:
    """Draw images and say what ran: engines, or torch and why."""
    from dataclasses import replace

    from sdaccel import draw as images
    from sdaccel.lora import chosen
    from sdaccel.progress import terminal_progress

    images.check_build(build)
    if no_engine and no_fallback:
        raise SettingError("--no-engine and --no-fallback exclude each other.")
    sides = _one_size(res, width, height)
    first = images.random_seed(count) if seed is None else seed
    request = images.Request(
        prompt,
        negative,
        *sides,
        steps,
        7.5 if guidance is None else guidance,
        first,
        count,
        scheduler,
        image,
        mask,
        strength,
        chosen(lora or ()),
    )
    paths = images.output_paths(expanded(output), [first + at for at in range(count)], force=force)
    checkpoint = _open(model, allow_pickle, variant, vae, prediction_type)
    if guidance is None:
        request = replace(request, guidance=images.usual_guidance(checkpoint))
    request = images.with_size(request, checkpoint.native_side)
    place = _store(store)
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        if no_engine:
            pipe, at_once = images.open_pipeline(checkpoint, request, tokenizer), 4
        else:
            pipe, at_once = images.open_accelerated(
                checkpoint, request, place, _backend(backend), build, not no_fallback, tokenizer, progress
            )
        result = images.draw(pipe, request, at_once=at_once, model=checkpoint.name, progress=progress)
    if result.ok:
        for drawn, path in zip(result.images, paths, strict=True):
            images.save(drawn, path, force=force)
    if as_json:
        console.print_json(
            {
                "ok": result.ok,
                "images": [{"path": str(d.path), "seed": d.seed} for d in result.images if d.path is not None],
                "seconds": result.seconds,
                "engine": not no_engine,
                "reports": [report.to_json() for report in result.reports],
            }
        )
    else:
        console.print_lines(["in plain torch, as asked"] * no_engine + images.report_lines(result))
        print(f"{len(result.images)} image{'s' * (count > 1)} in {result.seconds:.2f} s")
        for drawn in result.images:
            if drawn.path is not None:
                print(f"seed {drawn.seed}: {drawn.path}")
    if not result.ok:
        console.say(f"Nothing was saved: {'; '.join(result.failed)}")
        return DIFFERS
    return OK


@app.command()
def batch(
    jobs: Annotated[
        str, typer.Argument(metavar="JOBS", help="A .jsonl, .csv, .txt or .json file, a folder of prompts, or -.")
    ],
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Where images go; also s3:// and the like.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Default: SDACCEL_MODEL, else the demo.")
    ] = None,
    defaults: Annotated[
        Path | None, typer.Option("--defaults", metavar="FILE", help="A .toml with what jobs leave out: steps = 30.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option("--lora", metavar="FILE[:STRENGTH]", help="For jobs that name no loras. May be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Draw only what is missing in the folder.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="As --resume, and what was set aside once more.")] = False,
    batch_size: Annotated[
        str, typer.Option("--batch-size", metavar="N", help="Images at once; auto: what the engines take.")
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Processes that draw, each on a GPU of its own. Default: 1."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option("--ray", metavar="ADDRESS", help="auto, local or the address of a Ray cluster.")
    ] = None,
    expand: Annotated[
        str, typer.Option("--expand", metavar="HOW", help="{a|b} in prompts: random (by the seed), all, none.")
    ] = "random",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Changes the seeds of jobs without one.")] = 0,
    name: Annotated[
        str | None, typer.Option("--name", metavar="PATTERN", help="Default: {index:05d}-{seed}-{prompt}")
    ] = None,
    format_: Annotated[str, typer.Option("--format", metavar="NAME", help="png, jpg or webp.")] = "png",
    quality: Annotated[int, typer.Option("--quality", metavar="1..100", help="Of jpg and webp.")] = 95,
    sidecar: Annotated[bool, typer.Option("--sidecar", help="A .json beside each .png too.")] = False,
    no_sheet: Annotated[bool, typer.Option("--no-sheet", help="Write no contact sheet (index of images).")] = False,
    build: Annotated[
        str, typer.Option("--build", metavar="WHEN", help="never, or if-missing: build engines for these sizes first.")
    ] = "if-missing",
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Draw in plain torch.")] = False,
    no_fallback: Annotated[bool, typer.Option("--no-fallback", help="Fail rather than run anything in torch.")] = False,
    tokenizer: TokenizerOption = None,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    store: StoreOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> int:
    """Draw the images of a job file, each once, on one GPU or many. --json prints an event a line."""
    from sdaccel.jobs import display
    from sdaccel.jobs.command import draw_jobs
    from sdaccel.jobs.task import Options
    from sdaccel.lora import chosen

    if ray is not None and workers is not None:
        raise SettingError("--workers is for this machine, --ray for a cluster.", hint="Leave one of them out.")
    opening = {"allow_pickle": allow_pickle, "variant": variant, "vae": vae, "prediction_type": prediction_type}
    options = Options(
        out=out,
        model=model,
        store=str(store) if store else None,
        backend=_backend(backend),
        engines=not no_engine,
        build=build,
        fallback=not no_fallback,
        batch_size=None if batch_size == "auto" else _count(batch_size, "--batch-size", ", nor auto"),
        format=format_,
        quality=quality,
        sidecar=sidecar,
        opening=opening,
        tokenizer=str(tokenizer) if tokenizer else None,
    )
    going_on = console.told_when_stopped("Run the same command with --resume: it draws what is missing.")
    with going_on, display.events() if as_json else display.bar() as shown:
        run = draw_jobs(
            jobs,
            options,
            shown,
            defaults=defaults,
            loras=chosen(lora or ()),
            expand=expand,
            seed=seed,
            pattern=name,
            workers=1 if workers is None else workers,
            ray=ray,
            resume=resume,
            retry=retry,
            sheet=not no_sheet,
        )
    summary = run.summary
    if as_json:
        display.JsonEvents().say("summary", **summary.to_json())
    else:
        console.print_lines(display.summary_lines(run))
    for fault in summary.faults:
        console.say(f"error: {fault}")
    if summary.stopped:
        console.say(f"error: {summary.stopped}")
    if summary.stopped or summary.faults:
        return FAULT
    return OK if summary.ok else DIFFERS


@app.command()
def grid(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGES_OR_FOLDER...", help="Files, and folders of files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The sheet: .png, .jpg or .webp.")],
    columns: Annotated[
        int | None, typer.Option("--columns", metavar="N", help="Default: so many that the sheet is about square.")
    ] = None,
    side: Annotated[int, typer.Option("--side", metavar="PIXELS", help="Of each image.")] = 256,
    label: Annotated[str, typer.Option("--label", metavar="WHAT", help="name, none, seed or prompt.")] = "name",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Make a contact sheet: many images on one, small, each with its label."""
    from sdaccel import draw
    from sdaccel.jobs.grid import contact_sheet, find_images
    from sdaccel.metadata import encode
    from sdaccel.progress import terminal_progress

    output = expanded(output)
    draw.check_output(output, force=force)
    paths = find_images([expanded(place) for place in images], besides=output)
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        sheet = contact_sheet(paths, columns=columns, side=side, label=label, progress=progress)
    draw.write_new(output, encode(sheet.image, output.suffix), force=force)
    if as_json:
        skipped = {str(path): reason for path, reason in sheet.skipped.items()}
        console.print_json({"path": str(output), "images": sheet.shown, "columns": sheet.columns, "skipped": skipped})
    else:
        print(f"{sheet.shown} image{'s' * (sheet.shown != 1)} on {output}")
    for reason in sheet.skipped.values():
        console.say(f"left out: {reason}")
    return FAULT if sheet.skipped else OK


@app.command()
def verify(
    model: ModelArgument = None,
    component: ComponentOption = None,
    no_image: Annotated[bool, typer.Option("--no-image", help="Compare components only, no whole image.")] = False,
    res: Annotated[str | None, typer.Option("--res", metavar="SIZE", help="Size of the image.")] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N")] = 6,
    seed: Annotated[int, typer.Option("--seed", metavar="N")] = 0,
    tokenizer: TokenizerOption = None,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    store: StoreOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> int:
    """Compare a model's engines with torch: each component at several shapes, and a whole image of one seed."""
    from sdaccel.progress import terminal_progress
    from sdaccel.verify import verify as run_verify

    width, height = _one_size(res, None, None)
    size = None if width is None or height is None else (width, height)
    checkpoint = _open(model, allow_pickle, variant, vae, prediction_type)
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        found = run_verify(
            checkpoint,
            _store(store),
            backend=_backend(backend),
            components=tuple(component or ()),
            image=not no_image,
            size=size,
            steps=steps,
            seed=seed,
            tokenizer=tokenizer,
            progress=progress,
        )
    if as_json:
        console.print_json(found.to_json())
        return OK if found.ok else DIFFERS
    rows = [
        [c.component, c.engine[:12], _shape(c.shape), c.problem or f"{c.error:.1e}", f"{c.limit:.0e}", _verdict(c.ok)]
        for c in found.checks
    ]
    console.print_table(["component", "engine", "shape", "error", "limit", ""], rows)
    if found.image is not None:
        i = found.image
        print(
            f"image {i.width}x{i.height}, {i.steps} steps, seed {i.seed}: PSNR {i.psnr:.1f} dB "
            f"(at least {i.limits.image_psnr:g}), largest difference {i.max_abs:.4f} "
            f"(at most {i.limits.image_max_abs:g}): {_verdict(i.ok)}"
        )
        console.print_lines([f"not by an engine: {text}" for text in i.fallbacks])
        console.print_lines([f"failed: {text}" for text in i.failed])
    print(_verdict(found.ok))
    return OK if found.ok else DIFFERS


@app.command()
def bench(
    model: ModelArgument = None,
    res: Annotated[str | None, typer.Option("--res", metavar="SIZE", help="Default: the model's native size.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", metavar="N", help="Images at once; default 1.")] = None,
    component: ComponentOption = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Timed calls of each.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", metavar="N", help="Calls before.")] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Default: SDACCEL_THREADS, else 2.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Time torch.compile too.")] = False,
    overhead: Annotated[bool, typer.Option("--overhead/--no-overhead", help="Time the swap into a pipeline.")] = True,
    suite: Annotated[
        str, typer.Option("--suite", metavar="NAME", help="components, or batch: what sdaccel batch keeps of it.")
    ] = "components",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Of --suite batch.")] = 20,
    allow_pickle: PickleOption = False,
    variant: VariantOption = None,
    vae: VaeOption = None,
    prediction_type: PredictionOption = None,
    store: StoreOption = None,
    backend: BackendOption = None,
    as_json: JsonOption = False,
) -> int:
    """Time engines against torch, side by side in one run: same inputs, same threads, in turn."""
    if suite == "batch":
        opening = {"allow_pickle": allow_pickle, "variant": variant, "vae": vae, "prediction_type": prediction_type}
        chosen = {"model": model, "store": str(store) if store else None, "backend": _backend(backend)}
        return _bench_batch(chosen, opening, res, batch, steps, repeats, as_json)
    if suite != "components":
        raise SettingError(f"there is no suite {suite!r}: components, batch.")
    from sdaccel.bench import bench as run_bench
    from sdaccel.profile import parse_profiles
    from sdaccel.progress import terminal_progress

    checkpoint = _open(model, allow_pickle, variant, vae, prediction_type)
    native = checkpoint.native_side
    (profile,) = parse_profiles([res or str(native)], [batch or "1"], ["77"], native=native)
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        found = run_bench(
            checkpoint,
            _store(store),
            profile=profile,
            components=tuple(component or ()),
            backend=_backend(backend),
            repeats=repeats,
            warmup=warmup,
            threads=threads,
            compiled=compiled,
            overhead=overhead,
            progress=progress,
        )
    if as_json:
        console.print_json(found.to_json())
        return OK
    names = ["torch", *(["compile"] if compiled else []), "engine"]
    rows = []
    for result in found.results:
        cells = [
            f"{t.median:.4g} ({min(t.milliseconds):.4g}-{max(t.milliseconds):.4g})"
            for t in map(result.times.get, names)
            if t
        ]
        rows.append([result.component, _shape(result.shape), *cells, f"{result.ratio:.2f}x", f"{result.error:.1e}"])
    console.print_table(["component", "shape", *(f"{name}, ms" for name in names), "ratio", "error"], rows)
    for result in found.results:
        if result.overhead is not None:
            swap, session = (result.overhead[name].median for name in ("swap", "session"))
            more = f"{result.overhead_percent or 0.0:+.1f} %"
            print(f"{result.component} through the pipeline {swap:.2f} ms, session alone {session:.2f} ms: {more}")
    facts = found.machine
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(
        f"medians of {repeats} calls in turn, {facts['threads']} threads; {facts['cpu']}; {facts['date']}; {versions}"
    )
    return OK


@app.command()
def ui(
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="0: any that is free.")] = 7860,
    models: Annotated[
        Path | None, typer.Option("--models", metavar="FOLDER", help="A folder whose checkpoints can be chosen.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Where images are saved.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the pages in a browser.")] = True,
    store: StoreOption = None,
) -> int:
    """Serve pages to generate, build, compare and look after engines, for this machine's browser."""
    from sdaccel.ui.app import serve

    serve(host, port, store=_store(store), models=models, output=output, browser=browser)
    return OK


@lora.command("inspect")
def inspect_lora(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A .safetensors file of a LoRA or one of its relatives.")
    ],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Say what of it this model takes.")] = None,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> int:
    """Show format, ranks and target of a LoRA file, and what of it a model takes."""
    from sdaccel.adapters import read_adapter
    from sdaccel.adapters.report import describe, lines

    adapter = read_adapter(expanded(file))
    shapes = None
    if model is not None:
        parts = _open(model, allow_pickle, None, None, None).components
        shapes = {name: {each: ref.shape for each, ref in part.tensors.items()} for name, part in parts.items()}
    facts = describe(adapter, shapes)
    if as_json:
        console.print_json(facts)
    else:
        console.print_lines(lines(facts))
    return FAULT if facts["refused"] or facts["unused"] else OK


@app.command()
def doctor(store: StoreOption = None, as_json: JsonOption = False) -> int:
    """Look for what is missing or wrong, and name the command that puts it right."""
    from sdaccel import doctor as module

    found = module.diagnose(store)
    if as_json:
        console.print_json(found.to_json())
    else:
        print("\n".join(module.lines(found)))
    return OK if found.ok else FAULT


# ---- what commands share


def _store(place: Path | None) -> Store:
    from sdaccel.engine.store import Store

    return Store(place)


def _is_there(path: str) -> bool:
    try:
        return expanded(path).exists()
    except OSError:  # it is a path at least, and who opens it says what is wrong
        return True


def _bench_batch(
    chosen: dict[str, Any],
    opening: dict[str, Any],
    res: str | None,
    batch: str | None,
    steps: int,
    repeats: int,
    as_json: bool,
) -> int:
    from statistics import median

    from sdaccel.jobs.task import Options
    from sdaccel.jobs.throughput import bench_batch
    from sdaccel.progress import terminal_progress

    width, height = _one_size(res, None, None)
    options = Options("", batch_size=_count(batch, "--batch") if batch else None, opening=opening, **chosen)
    with terminal_progress(enabled=console.bar(as_json)) as progress:
        found = bench_batch(options, width=width, height=height, steps=steps, repeats=repeats, progress=progress)
    if as_json:
        console.print_json(found.to_json())
        return OK
    shape = f"{found.width}x{found.height}, {found.at_once} at once, {found.steps} steps"
    bare, loop = (f"{median(rates):.4g} ({min(rates):.4g}-{max(rates):.4g})" for rates in (found.bare, found.loop))
    names = ["model", "shape", "engine calls alone, images/s", "batch, images/s", "ratio"]
    console.print_table(names, [[found.model, shape, bare, loop, f"{found.ratio:.1%}"]])
    facts = found.machine
    print(f"medians of {repeats} runs of {found.images} images; {facts.get('gpu') or facts['cpu']}; {facts['date']}")
    return OK


def _count(text: str, option: str, other: str = "") -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise SettingError(f"{option} {text} is no number from 1 to 64{other}.")
    return int(text)


def _backend(name: str | None) -> str:
    return name or settings.BACKEND.value()


def _open(
    model: str | None, allow_pickle: bool, variant: str | None, vae: Path | None, prediction_type: str | None
) -> Any:
    """The checkpoint that the command works on, after saying which it is."""
    from sdaccel.model_choice import choose_model, open_model

    choice = choose_model(model)
    console.say(f"model: {choice}")
    checkpoint = open_model(
        choice, allow_pickle=allow_pickle, variant=variant, vae=vae, prediction_type=prediction_type
    )
    for note in checkpoint.notes:
        console.say(f"note: {note}")
    if checkpoint.ignored:
        some = ", ".join(checkpoint.ignored[:3])
        console.say(
            f"note: {len(checkpoint.ignored)} tensors are not used ({some}{', ...' * (len(checkpoint.ignored) > 3)})"
        )
    return checkpoint


def _profiles(
    checkpoint: Any,
    res: Sequence[str] | None,
    batch: Sequence[str] | None,
    tokens: Sequence[str] | None,
    preset: str | None,
) -> tuple[ImageProfile, ...]:
    from sdaccel.presets import find_preset
    from sdaccel.profile import parse_profiles

    if preset is None:
        return parse_profiles(res or (), batch or (), tokens or (), native=checkpoint.native_side)
    if res or batch or tokens:
        raise SettingError(
            "a preset brings its own profiles.", hint="Leave out --res, --batch and --tokens, or --preset."
        )
    return find_preset(preset).image_profiles(checkpoint.family.value, checkpoint.native_side)


def _one_size(res: str | None, width: int | None, height: int | None) -> tuple[int | None, int | None]:
    from sdaccel.profile import parse_resolution

    if res is None:
        return width, height
    if width is not None or height is not None:
        raise SettingError("--res says both sides already.", hint="Leave out --width and --height.")
    wide, tall = parse_resolution(res)
    for side in (wide, tall):
        if side.min != side.max:
            raise SettingError(f"--res {res} is a range: an image has one size.", hint="Write 512 or 832x1216.")
    return wide.opt, tall.opt


def _inspect_model(checkpoint: Any, as_json: bool) -> int:
    from sdaccel.listing import size_text

    facts: dict[str, Any] = {
        "name": checkpoint.name,
        "origin": checkpoint.origin,
        "kind": checkpoint.kind,
        "family": checkpoint.family.value,
        "variant": checkpoint.variant,
        "native_side": checkpoint.native_side,
        "vae_factor": checkpoint.vae_factor,
        "prediction_type": checkpoint.prediction_type,
        "notes": list(checkpoint.notes),
        "ignored": list(checkpoint.ignored),
    }
    parts = {
        name: {
            "parameters": part.parameters,
            "bytes": part.nbytes,
            "tensors": len(part.tensors),
            "hash": part.content_hash,
        }
        for name, part in checkpoint.components.items()
    }
    if as_json:
        console.print_json({**facts, "components": parts})
        return OK
    console.print_lines([f"{name}: {value}" for name, value in facts.items() if not isinstance(value, list)])
    rows = [
        [name, f"{p['parameters'] / 1e6:.1f} M", size_text(p["bytes"]), str(p["tensors"]), p["hash"][:12]]
        for name, p in parts.items()
    ]
    console.print_table(["component", "parameters", "size", "tensors", "hash"], rows)
    if checkpoint.ignored:
        print(f"{len(checkpoint.ignored)} tensors are not used: {', '.join(checkpoint.ignored[:5])}")
    return OK


def _engine_json(item: Listed) -> dict[str, Any]:
    facts = item.to_json()
    if item.entry is not None:
        facts |= {
            "manifest": item.entry.engine.to_json(),
            "files": {name: info.size for name, info in item.entry.files.items()},
        }
    return facts


def _print_engine(item: Listed) -> None:
    from sdaccel.listing import profile_text, size_text

    state = f"{item.state}: {item.reason}" if item.reason else item.state
    if item.entry is None:
        console.print_lines([f"engine {item.key}", f"  state: {state}"])
        return
    engine = item.entry.engine
    ops, fused = engine.details.get("ops", {}), engine.details.get("fused", {})
    facts = {
        "state": state,
        "component": f"{engine.component} of {engine.model} ({engine.family})",
        "origin": engine.origin,
        "weights": engine.weights,
        "architecture": engine.architecture,
        "backend": f"{engine.backend} {engine.precision}, {_pairs(engine.versions)}",
        "device": _pairs(engine.device),
        "size": f"{size_text(item.nbytes)} own, {size_text(item.shared)} shared",
        "built": f"{engine.created} in {_built_in(item.entry)}",
        "error": _error(item) or "not checked",
        "inputs": "; ".join(f"{t.name} {list(t.shape)}{' optional' * t.optional}" for t in engine.inputs[:6]),
        "outputs": "; ".join(f"{t.name} {list(t.shape)}" for t in engine.outputs[:6]),
        "ops": _pairs(ops) if isinstance(ops, dict) else "",
        "fusions": _pairs(fused) if isinstance(fused, dict) else "",
    }
    print(f"engine {item.key}")
    console.print_lines([f"  {name}: {value}" for name, value in facts.items() if value])
    for image, profile in zip(profile_text(item.entry), engine.profiles, strict=False):
        print(f"  profile: {image}  ->  {profile}")
    hidden = max(0, len(engine.inputs) - 6) + max(0, len(engine.outputs) - 6)
    if hidden:
        print(f"  {hidden} more inputs and outputs: --json shows all")
    if engine.backend == "cuda":
        _print_tactics(engine.details)


def _built_in(entry: Entry) -> str:
    from sdaccel.listing import adopted_from

    other = adopted_from(entry)
    return f"{entry.engine.build_seconds:.1f} s{f', adopted from {other[:12]}' if other else ''}"


def _print_tactics(details: dict[str, Any], most: int = 24) -> None:
    """The steps that take longest, against what the device reaches."""
    ceilings = details["ceilings"]
    for profile in details["profiles"]:
        steps = profile["steps"]
        total = sum(step["count"] * (step["microseconds"] or 0.0) for step in steps)
        rows = []
        for step in steps[:most]:
            seconds = (step["microseconds"] or 0.0) / 1e6
            operations, moved = (step[name] / seconds if seconds else 0.0 for name in ("operations", "bytes"))
            rows.append(
                [
                    step["op"],
                    step["tactic"],
                    str(step["count"]),
                    f"{1e6 * seconds:.1f}",
                    f"{100 * step['count'] * 1e6 * seconds / total:.1f} %" if total else "",
                    f"{operations / 1e12:.0f} ({100 * operations / ceilings['operations']:.0f} %)"
                    if operations
                    else "",
                    f"{moved / 1e12:.2f} ({100 * moved / ceilings['bytes']:.0f} %)",
                ]
            )
        print(f"  tuned for {profile['profile']}: {total / 1e3:.2f} ms in {sum(s['count'] for s in steps)} steps")
        heads = ["op", "tactic", "steps", "us", "of all", "TFLOP/s (of ceiling)", "TB/s (of ceiling)"]
        console.print_table(heads, rows)
        if len(steps) > most:
            print(f"  {len(steps) - most} more kinds of steps: --json shows all")
    console.print_lines([f"  not used: {name}: {reason}" for name, reason in details.get("refused", {}).items()])


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _id_and_profiles(item: Listed) -> list[str]:
    from sdaccel.listing import profile_text

    return [item.key[:12], "\n".join(profile_text(item.entry)) if item.entry else ""]


def _sizes(item: Listed) -> list[str]:
    from sdaccel.listing import size_text

    return [size_text(item.nbytes), size_text(item.shared)]


def _error(item: Listed) -> str:
    from sdaccel.listing import check_error

    error = check_error(item.entry) if item.entry else None
    return "" if error is None else f"{error:.1e}"


def _shape(sizes: dict[str, int]) -> str:
    order = ("batch", "height", "width", "tokens")
    return " ".join(f"{axis} {sizes[axis]}" for axis in order if axis in sizes)


def _verdict(ok: bool) -> str:
    return "equal" if ok else "DIFFERS"


def main() -> None:
    """The entry point of ``sdaccel``."""
    console.main(app)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line in this process and returns its exit code."""
    return console.run(app, arguments)
