"""Contracts for services in other languages: printed, written to files, and held against those files."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from contracts import schemas
from contracts.errors import ContractViolation
from orchestrator import flows
from orchestrator.cli.output import Exit, as_json, note, plain, say
from orchestrator.settings import Settings


def contracts(args: Namespace, _: Settings) -> int:
    """Print the contracts of modules; with --out write them, or with --check too say what has changed."""
    if args.check and args.out is None:
        raise ContractViolation("--check: expected --out DIR to look at, found none")
    made = documents(args.modules)
    if args.out is None:
        say(as_json(made))
        return Exit.OK
    folder, files = Path(args.out), schemas.files(made)
    if args.check:
        return check(folder, files)
    write(folder, files)
    return Exit.OK


def documents(modules: list[str]) -> list[schemas.Document]:
    """Raises ContractsInvalid for a module that has no contracts."""
    things: list[object] = []
    for name in modules:
        inside = list(vars(flows.imported(name)).values())
        if not schemas.contracts_in(inside):
            raise schemas.ContractsInvalid(
                f"module {name}: expected a Command or Event with type=, found none"
            )
        things += inside
    return schemas.documents(schemas.contracts_in(things))


def check(folder: Path, files: Mapping[str, bytes]) -> int:
    changes = list(changes_of(folder, files))
    for name, what in changes:
        say(f"{what}  {plain(name)}")
    note(
        f"{len(changes)} to write anew or remove."
        if changes
        else "All contracts are as the modules have them."
    )
    return Exit.ERROR if changes else Exit.OK


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make `folder` what `files` says, touching nothing that is so already, or whose name is not a contract's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in list(changes_of(folder, files)):
        if what == "superfluous":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(files[name])
        say(f"{'removed' if what == 'superfluous' else 'written'}  {plain(name)}")


def changes_of(folder: Path, files: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Each file that is not as `files` has it, in order, and whether it is missing, stale or superfluous."""
    there = {path.name for path in folder.glob(f"*{schemas.SUFFIX}")} if folder.exists() else set[str]()
    for name in sorted(there | files.keys()):
        if name not in there:
            yield name, "missing"
        elif name not in files:
            yield name, "superfluous"
        elif (folder / name).read_bytes() != files[name]:
            yield name, "stale"
