"""python -m workbook: list, doctor, build, check, bench, sweep, results, records, export, run,
report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workbook import journal, paths
from workbook.cli_options import add_export, add_json, add_sweep, add_where, positive, seconds
from workbook.lines import print_lines

__all__ = ["main"]

Arguments = argparse.Namespace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if all is well, 1 if a check or report failed, 2 if it could not run."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return _stopped("stopped; what was measured before is in .runs/", 130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0
    except _expected() as error:
        words = error.args[0] if isinstance(error, KeyError) else error
        return _stopped(str(words), 2)


def _expected() -> tuple[type[Exception], ...]:
    """What a user can cause: told in its own words, without a traceback."""
    from workbook import build, machine, pages

    return (
        KeyError, ValueError, FileNotFoundError, PermissionError, paths.NotInCheckout,
        journal.JournalError, machine.NoDevice, build.BuildError, build.CompilerMissing,
        pages.MissingJupyter,
    )  # fmt: skip


def _stopped(words: str, status: int) -> int:
    print(f"workbook: {words}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m workbook", description="Fused PyTorch chains: build, check, time, report."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable, help: str, example: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=help, description=help[0].upper() + help[1:] + ".",
            epilog=f"example:  python -m workbook {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(run=run)
        return command

    slug = "matmul_sum_max_mean_logsumexp"
    add_json(add("list", _list, "the problems, their sizes and variants", "list"))
    add_json(add("doctor", _doctor, "what this machine has and lacks, with the remedy", "doctor"))
    build = add("build", _build, "compile the kernels of a problem", f"build {slug} --verbose")
    add_where(build, size=False)
    build.add_argument("--verbose", action="store_true", help="show ninja and ptxas at work")
    check = add("check", _check, "hold variants against the float64 oracle", f"check {slug}")
    add_where(check)
    check.add_argument("--variants", help="comma-separated, or `controls`, `all`; default: fused")
    check.add_argument("--protocol", choices=("eval", "harness"),
                       help="as a public protocol judges, our rule beside it")  # fmt: skip
    check.add_argument("--file", type=Path, metavar="FILE.py",
                       help="with --protocol: judge the ModelNew of a file")  # fmt: skip
    bench = add("bench", _bench, "time variants in turn", f"bench {slug} --size laptop --json")
    add_where(bench)
    bench.add_argument("--variants", help="comma-separated; all of the device if not given")
    bench.add_argument("--rounds", type=positive, default=30, help="samples of each (30)")
    bench.add_argument("--budget", type=seconds, default=20.0, help="seconds for all samples (20)")
    bench.add_argument("--flush", default="read", choices=("read", "write", "none"),
                       help="how the cache is emptied before each sample (read)")  # fmt: skip
    bench.add_argument("--training", action="store_true",
                       help="a training step of eager and the drop-in, and its parts")  # fmt: skip
    add_sweep(add("sweep", _sweep, "time variants over B, K and N", f"sweep {slug} --axis K"))
    results = add("results", _results, "recorded times, newest run of a card first", "results")
    results.add_argument("slugs", nargs="*", metavar="SLUG")
    add_json(results)
    results.add_argument("--picture", type=Path, metavar="FILE", help="write the README's picture")
    results.add_argument("--markdown", action="store_true", help="the README's table")
    records = add("records", _records, "take records from elsewhere into data/",
                  "records import from_the_gpu_server.jsonl")  # fmt: skip
    records.add_argument("action", choices=("import",))
    records.add_argument("file", type=Path, metavar="FILE", help="a .jsonl file or a folder")
    add_export(add("export", _export, "write ModelNew as one file that needs only torch",
                 f"export {slug} -o model_new.py --reference model.py"))  # fmt: skip
    run = add("run", _run, "execute notebooks without Jupyter",
              "run 01_matmul_sum_max_mean_logsumexp --output executed/")  # fmt: skip
    run.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="name or path; all if none")
    run.add_argument("--output", type=Path, help="folder for the executed notebooks")
    report = add("report", _report, "execute notebooks and export HTML", "report")
    report.add_argument("notebooks", nargs="*", metavar="SLUG", help="part of a name; all if none")
    report.add_argument("--out", type=Path, help="folder of the pages (reports/)")
    return parser


def _device(arguments: Arguments) -> str:
    from workbook import machine

    return machine.default_device(arguments.device)


def _list(arguments: Arguments) -> int:
    from workbook.chains import problems

    for p in problems():
        keys = [v.key for v in p.variants]
        if arguments.json:
            sizes = {name: {**p.shape(name)} for name in p.sizes}
            print_lines([{"problem": p.slug, "title": p.title, "sizes": sizes, "variants": keys}])
            continue
        sizes = "; ".join(f"{n}: " + ", ".join(f"{k}={v}" for k, v in p.shape(n).items())
                          for n in p.sizes)  # fmt: skip
        print(f"{p.slug}\n  {p.title}\n  sizes     {sizes}\n  variants  {', '.join(keys)}")
    return 0


def _doctor(arguments: Arguments) -> int:
    from workbook.diagnosis import doctor

    findings = doctor()
    if arguments.json:
        print_lines(vars(f) for f in findings)
    else:
        print("\n".join(map(str, findings)))
    return int(any(f.ok is False for f in findings))


def _build(arguments: Arguments) -> int:
    from workbook import ops
    from workbook.chains import problem
    from workbook.variants import library_of

    device = _device(arguments)
    for slug in arguments.slugs:
        for v in problem(slug).variants:
            if v.source is not None and device in v.devices:
                made = library_of(slug, v, verbose=arguments.verbose)
                state = "was there" if made.cached else f"built in {made.seconds:.1f} s"
                print(f"{slug} {v.key}: {state} ({made.digest})")
    for file in sorted(paths.kernels().glob("*/*.cu" if device == "cuda" else "*/*.cpp")):
        if file.stem == file.parent.name:  # what several problems share
            ops.built(file.stem, ops.kind_of(file), [file.name])
    return 0


def _check(arguments: Arguments) -> int:
    from workbook import cli_check

    return cli_check.run(arguments, _device(arguments))


def _bench(arguments: Arguments) -> int:
    from workbook.chains import problem
    from workbook.compare import bench
    from workbook.results import line
    from workbook.training import bench_training

    device, mode = _device(arguments), "train" if arguments.training else "eval"
    for slug in arguments.slugs:
        names = arguments.variants.split(",") if arguments.variants else None
        result = (bench_training if arguments.training else bench)(
            problem(slug), size=arguments.size, device=device, variants=names,
            mode=arguments.mode or mode,
            rounds=arguments.rounds, budget_s=arguments.budget, flush=arguments.flush,
            keep=arguments.keep, progress=True,
        )  # fmt: skip
        if arguments.json:
            print_lines(map(line, result.records))
        else:
            first = result.records[0]
            shape = ", ".join(f"{k}={v}" for k, v in first.shape.items())
            print(f"{slug} on {first.card}, {first.size} ({shape})\n{result}")
    return 0


def _sweep(arguments: Arguments) -> int:
    from workbook import cli_sweep

    return cli_sweep.run(arguments, _device(arguments))


def _results(arguments: Arguments) -> int:
    from workbook.results import line

    kept = journal.load(paths.data()).query(kind="bench", part="")
    if not kept:
        raise ValueError("data/ holds no results: run `bench SLUG --keep` or `records import FILE`")
    wanted = tuple(arguments.slugs) or tuple({r.problem for r in kept})
    unknown = sorted(set(wanted) - {r.problem for r in kept})
    if unknown:
        raise KeyError(f"no results of {', '.join(unknown)} in data/")
    newest = sorted(
        kept.query(problem=wanted).newest(), key=lambda r: (r.card, r.date), reverse=True
    )
    if arguments.json:
        print_lines(map(line, newest))
        return 0
    if arguments.picture:
        from workbook.tables import cover

        print(cover().save(arguments.picture))
        return 0
    if arguments.markdown:
        from workbook.tables import summary

        print(summary(kept.query(problem=wanted)))
        return 0
    for r in newest:
        ms = "failed" if r.median_ms is None else f"{r.median_ms:.4g} ms"
        size = r.size + (", train" if r.mode == "train" else "")
        size += f", flush {r.flush}" if r.flush not in ("", "read") else ""
        print(f"{r.card} | {r.problem} | {size} | {line(r)['variant']} | {ms} | {r.date}")
    return 0


def _records(arguments: Arguments) -> int:
    if not arguments.file.exists():
        raise FileNotFoundError(f"FILE: {arguments.file} is not there")
    found = journal.load(arguments.file)
    if not found:
        raise ValueError(f"FILE: {arguments.file} holds no records")
    there = {r.to_json() for r in journal.load(paths.data())}
    new = list({r.to_json(): r for r in found if r.to_json() not in there}.values())
    for place in sorted({journal.place(r, paths.data()) for r in new}):
        journal.append([r for r in new if journal.place(r, paths.data()) == place], place)
        print(place.relative_to(paths.root()))
    print(f"{len(new)} records taken, {len(found) - len(new)} were there", file=sys.stderr)
    return 0


def _export(arguments: Arguments) -> int:
    from workbook.export import export

    given = arguments.slug, arguments.file, arguments.reference, arguments.force
    print(*export(*given), sep="\n")
    return 0


def _notebooks(names: Sequence[str]) -> list[Path]:
    """Notebooks whose name holds one of `names`, in reading order; paths stand for themselves."""
    every = sorted(paths.notebooks().glob("*.ipynb"))
    if not names:
        return every
    found = [Path(n) for n in names if n.endswith(".ipynb")]
    for name in (n for n in names if not n.endswith(".ipynb")):
        held = [file for file in every if name in file.stem]
        if not held:
            raise KeyError(f"notebook: got {name!r}; there are {', '.join(f.stem for f in every)}")
        found += held
    return found


def _run(arguments: Arguments) -> int:
    from workbook.runner import run_notebook

    right = True
    for file in _notebooks(arguments.notebooks):
        output = arguments.output / file.name if arguments.output else None
        result = run_notebook(file, output=output)
        state = "ok" if result.ok else f"FAILED: {result.error}"
        print(f"{file.stem}: {state} ({result.seconds:.1f} s)", flush=True)
        right &= result.ok
    return int(not right)


def _report(arguments: Arguments) -> int:
    from workbook import report

    return report.exit_status(report.export(_notebooks(arguments.notebooks), arguments.out))
