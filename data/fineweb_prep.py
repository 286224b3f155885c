"""FineWeb's text to shards, by yourself: `speedrun data prep` under the name where one looks for it.

    python data/fineweb_prep.py                                       FineWeb's sample of 10 billion tokens
    python data/fineweb_prep.py --source DIR --out data/fineweb10B    the same from parquet or jsonl that is here

The work is done by `speedrun/data/prep.py`; docs/data.md tells of it; --help lists the options.
"""

import sys

from speedrun.cli import command

# The workers import this file, too.
if __name__ == "__main__":
    command(["data", "prep", *sys.argv[1:]], prog_name="speedrun")
