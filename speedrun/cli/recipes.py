"""`speedrun recipes`: what there is to run, and what can be set."""

import click
import msgspec

from speedrun.cli.options import example, json_option


@click.command(epilog=example("speedrun recipes", "speedrun recipes smoke"))
@click.argument("name", required=False)
@json_option
def command(*, name: str | None, as_json: bool) -> None:
    """List the recipes, or the settings of the recipe NAME with their values, as --set takes them."""
    from speedrun.science import params, recipes
    from speedrun.science.recipe import IDENTITY, settings

    if name is not None:
        found = {key: value for key, value in settings(recipes.load(name)).items() if key not in IDENTITY}
        lines = [f"{key}={value}" for key, value in found.items()]
    else:
        all_of_them = [recipes.load(each) for each in recipes.names()]
        found = {
            one.name: {
                "summary": one.summary,
                "parent": one.parent,
                "num_params": params.count(one.table(one.config)),
                "num_steps": one.num_steps,
                "total_tokens": one.total_tokens,
            }
            for one in all_of_them
        }
        width = max(map(len, found))
        lines = [
            f"{key:<{width}}  {one['num_params']:>12,} parameters  {one['total_tokens']:>12,} tokens  {one['summary']}"
            for key, one in found.items()
        ]
    click.echo(msgspec.json.encode(found) if as_json else "\n".join(lines))
