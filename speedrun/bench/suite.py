"""All benchmarks in one session, as `speedrun bench all` runs them: tokens, worker, results, summary, archive."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from speedrun.bench import loading, session, summary
from speedrun.bench.parts import FULL, TINY, Part, Size, chosen, parts
from speedrun.bench.session import Result
from speedrun.data import imitation, stream
from speedrun.ground import signals
from speedrun.ground import track as tracks
from speedrun.ground.errors import SpeedrunError, UsageError, translate_os_errors

_PACKAGES = ("jax", "jaxlib", "numpy", "optax")


@dataclass(frozen=True)
class Suite:
    """What is measured, and where results go."""

    machine: list[str]  #: what it is, in lines
    out: Path  #: an absolute path; results of earlier slices stay
    work: Path  #: keeps compiled programs and made tokens
    shards: Path | None  #: real tokens; None: imitated ones
    rival: Path | None  #: a folder with another program (`bench.rival`)
    rehearse: bool  #: tiny, on the CPU

    @cached_property
    def parts(self) -> list[Part]:
        """All parts, in the order in which they run."""
        return parts(self._size, self.out, self._tokens, self.rival and self.rival.absolute())

    @property
    def _size(self) -> Size:
        return TINY if self.rehearse else FULL

    @property
    def _tokens(self) -> Path:
        return (self.shards or self.work / ("tokens-tiny" if self.rehearse else "tokens")).absolute()

    def run(self, names: str | None, minutes: float, say: Callable[[str], object]) -> None:
        """Run parts, and write summary and archive after each.

        `names` has commas between parts; None: all without a result. `minutes` limits all of them together.

        Raises:
            UsageError: for unknown names; if JAX cannot use the GPU.
            DataError: if there are too few tokens.
            SpeedrunError: if a part gave no figures.
        """
        wanted = self.parts if names is None else chosen(self.parts, names)
        self._provide()
        with translate_os_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        before, first = session.results(self.out), self.parts[0]
        if names is None:
            wanted = [part for part in wanted if part.name not in before or before[part.name].status == "cut"]
        if not self.rehearse:  # it starts CUDA: where it fails, all others would
            wanted = [first, *(part for part in wanted if part != first)]
        ended: list[Result] = []

        def end(result: Result) -> None:
            ended.append(result)
            say(f"{result.status:<8} {result.name:<28} {result.seconds:6.1f} s  {result.reason}")
            self._write()
            if result.name == first.name and result.status != "ok" and not self.rehearse:
                raise UsageError(
                    f"JAX cannot use this GPU: {result.reason}; {self.out}/parts/{result.name}.err tells more"
                )

        with signals.handled_by(signals.stop):
            session.run(wanted, self.out, _worker(), env=self._environment(), most_s=60 * minutes, ended=end)
        for choices in sorted((self.work / "programs").glob("*autotune*")):
            shutil.copytree(choices, self.out / "autotune", dirs_exist_ok=True)
        left_out = self._write()
        if late := [part.name for part in wanted[len(ended) :]]:
            say(f"time is up before {', '.join(late)}; the same command continues there")
        if left_out:
            say(f"too large for the archive: {', '.join(left_out)}")
        say(f"summary in {self.out}/summary.md, everything in {self.out}/outputs.tar.gz")
        if bad := [result.name for result in ended if result.status in ("failed", "died", "killed")]:
            raise SpeedrunError(
                f"{len(bad)} of {len(ended)} parts gave no figures: {', '.join(bad)}; see the summary"
            )

    def _provide(self) -> None:
        """Make tokens, or check those given."""
        rules, need = tracks.load("webmini").data, self._size.text_steps * self._size.text_tokens
        if self.shards is None and not self._tokens.is_dir():
            imitation.write(
                self._tokens,
                train_tokens=2 * need,
                val_tokens=rules.val_tokens + 1,
                vocab_size=rules.vocab_size,
                document_token=rules.document_token,
            )
        shards = loading.folder_shards(self._tokens, None)
        stream.require_steps(shards, [stream.Shape(1, self._size.text_tokens)] * self._size.text_steps)

    def _environment(self) -> dict[str, str]:
        """Of the worker. Programs are kept from slice to slice."""
        defaults = {
            "JAX_COMPILATION_CACHE_DIR": str((self.work / "programs").absolute()),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        # With both platforms JAX would fall back to the CPU silently.
        return {**defaults, **os.environ, "JAX_PLATFORMS": "cpu" if self.rehearse else "cuda"}

    def _write(self) -> list[str]:
        """Write summary and archive; a session that is cut off leaves both. Returns what the archive leaves out."""
        python = ".".join(map(str, sys.version_info[:3]))
        software = [f"python {python}", *(f"{name} {metadata.version(name)}" for name in _PACKAGES)]
        tokens = f"tokens: {self.shards or 'synthetic, with the document lengths of FineWeb'}"
        summary.write([*self.machine, ", ".join(software), tokens], self.parts, self.out)
        return summary.archive(self.out)


def _worker() -> list[str]:
    return [sys.executable, "-m", "speedrun.cli.warm"]
