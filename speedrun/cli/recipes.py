"""`speedrun recipes`: the recipes, and their settings."""

import click

from speedrun.base.console import clean
from speedrun.base.output import expected
from speedrun.base.recipe_files import resolve
from speedrun.cli import options as cli


@cli.new_command("speedrun recipes", "speedrun recipes smoke")
@click.argument("name", type=resolve, required=False)
def command(*, name: str | None) -> cli.Answer:
    """List the recipes, or the settings of the recipe NAME with their values, as --set takes them.

    A recipe that cannot be loaded is left out, with a warning.
    """
    from speedrun import recipes
    from speedrun.science import params
    from speedrun.science.recipe import IDENTITY, settings

    found: dict[str, object] = {}
    lines = []
    if name is not None:
        found = {key: value for key, value in settings(recipes.load(name)).items() if key not in IDENTITY}
        lines = [f"{key}={value}" for key, value in found.items()]
    for each in recipes.names() if name is None else []:
        try:
            one = recipes.load(each)
        except BaseException as error:
            if (known := expected(error)) is None:
                raise
            click.echo(clean(f"warning: recipe {each} cannot be loaded: {known}"), err=True)
            continue
        num_params = params.count(one.table(one.config))
        found[each] = {
            "summary": one.summary,
            "parent": one.parent,
            "num_params": num_params,
            "num_steps": one.num_steps,
            "total_tokens": one.total_tokens,
        }
        counts = f"{num_params:>12,} parameters  {one.total_tokens:>12,} tokens"
        lines.append(f"{each:<{max(map(len, recipes.names()))}}  {counts}  {one.summary}")
    return cli.Answer(found, lines)
