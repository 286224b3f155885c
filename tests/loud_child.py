"""A child of a keeper that prints more than a pipe holds."""

from speedrun.train import child, keeper

if __name__ == "__main__":
    with child.attended(keeper.Job):
        print("x\n" * 2**17, flush=True)  # noqa: T201
