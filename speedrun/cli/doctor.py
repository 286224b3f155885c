"""`speedrun doctor`: what this machine can run, and the command to type next."""

import click
import msgspec

from speedrun.base import track as tracks
from speedrun.base.console import clean
from speedrun.cli import options as cli
from speedrun.machine import checkup
from speedrun.machine.check_software import Check

_COLOURS = {"ok": "green", "note": "yellow", "bad": "red"}


@cli.new_command("speedrun doctor", "speedrun doctor --track main-8xh100", "speedrun doctor --json")
@cli.option(
    "--track NAME",
    str,
    "Only what this track needs. Default: all tracks, with a proposal for the hardest one that fits.",
)
@click.pass_context
def command(ctx: click.Context, *, track: str | None) -> cli.Answer:
    """Check what this machine can run, and print the next command.

    Exits with 0 if the track can run here (its data may be missing), else with 1.
    """
    rules, checks = tracks.load(track or checkup.SMOKE), []
    for check in checkup.checks(rules, alone=track is not None):
        checks.append(check)
        if not ctx.params["as_json"]:
            _print(check)
    ready = all(check.ok for check in checks if check.needed)
    again = "speedrun doctor" + (f" --track {track}" if track else "")
    repair = f"repair what is marked above, then: {again}"
    following = checkup.advice(checks, asked=track) if ready else repair
    report = {
        "ready": ready,
        "track": rules.name,
        "qualifies": [check.name[6:] for check in checks if check.name[:6] == "track " and check.ok],
        "checks": [{**msgspec.structs.asdict(check), "mark": check.mark} for check in checks],
        "next": following,
    }
    return cli.Answer(report, [f"next: {following}"], 0 if ready else 1)


def _print(check: Check) -> None:
    """Print a check at once, as some take seconds."""
    mark = click.style(f"{check.mark:<4}", fg=_COLOURS[check.mark])
    click.echo(f"{mark}  {clean(f'{check.name}: {check.found}')}")
