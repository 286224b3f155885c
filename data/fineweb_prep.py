"""Shards from FineWeb's text: the command `speedrun data prep`.

    python data/fineweb_prep.py                                       FineWeb's sample of 10 billion tokens
    python data/fineweb_prep.py --source DIR --out data/fineweb10B    the same from local parquet or jsonl

`speedrun/data/prepare.py` does the work. See docs/data.md, or --help for the options.
"""

import sys

from speedrun.cli import command

if __name__ == "__main__":
    command(["data", "prep", *sys.argv[1:]], prog_name="speedrun")
