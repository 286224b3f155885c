from speedrun.api import Record as Record
from speedrun.api import load as load
from speedrun.api import run as run

__version__: str
