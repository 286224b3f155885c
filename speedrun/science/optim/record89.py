"""The optimiser of record 89: NorMuon at every step, Adam at every second."""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import optax

from speedrun.ground.errors import UsageError
from speedrun.ground.limits import Momentum, Positive, Rate
from speedrun.science.optim.cautious_adam import AdamGroup, cautious_adam
from speedrun.science.optim.normuon import normuon
from speedrun.science.params import Dtype, Layout, Member


@dataclass(frozen=True, slots=True)
class NorMuonAndAdam:
    """NorMuon for group "matrix", Adam for all others. Both decays grow with the square of the learning rate.

    Learning rates are peak values, multiplied by the input `lr_scale`. With tables in bfloat16 the state has 12 bytes
    for each of their scalars (2 parameter, 2 waiting gradient, 8 moments) and 8 for those of matrices.
    """

    muon_lr: Rate
    muon_decay: Rate
    muon_beta2: Momentum  #: of the second moment
    polar_dtype: Dtype  #: of Polar Express
    rate_of: Callable[[Member], float]  #: times `muon_lr`
    adam_lr: Rate
    adam_eps: Positive
    adam_decay: Rate
    adam: tuple[AdamGroup, ...]  #: one for each group but "matrix"
    tied: tuple[str, str] = ("head", "embed")  #: updated as one while the input `tied` is true

    def transform(self, layout: Layout) -> optax.GradientTransformationExtraArgs:
        """Return the transformation of packed parameters.

        Raises:
            UsageError: for a group without settings; for tied tables that would part.
        """
        settings = {group.name: group for group in self.adam}
        matrices = [name for name, group in layout.groups.items() if group == "matrix"]
        others = {name: group for name, group in layout.groups.items() if group != "matrix"}
        if missing := sorted({*others.values()} - {*settings}):
            raise UsageError(f"its optimizer has no AdamGroup for group {missing[0]!r} of its table")
        groups = {name: settings[group] for name, group in others.items()}
        rules = {name: astuple(groups[name])[1:] for name in self.tied if name in groups}
        starts = {layout.table[name].like or name for name in rules}
        if len(rules) != 2 or len(self.tied) != 2 or len({*rules.values()}) != 1 or len(starts) != 1:
            raise UsageError(
                f"its optimizer ties {self.tied}; need two tables with equal starts, whose groups have equal settings"
            )
        rates = partial(layout.per_matrix, self.rate_of)
        muon = normuon(matrices, rates, self.muon_lr, self.muon_decay, self.muon_beta2, self.polar_dtype)
        adam = cautious_adam(groups, self.tied, self.adam_lr, eps=self.adam_eps, decay=self.adam_decay)
        return optax.chain(muon, adam)
