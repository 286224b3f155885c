from speedrun.library import Record as Record
from speedrun.library import load as load
from speedrun.library import run as run

__version__: str
