"""What `explain` returns: the setting, the steps by key, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qkv.errors import unknown_name
from qkv.explain.layout import Style
from qkv.explain.mistakes import make_mistake
from qkv.explain.record import record
from qkv.explain.render import render
from qkv.explain.steps import STEP_KEYS, Check, Mistake, Setting, Step


@dataclass(frozen=True, kw_only=True, eq=False)
class Explanation:
    """One attention call, explained: `e.steps["softmax"].value` is a tensor (B, H, L, S), `print(e)` shows all."""

    setting: Setting
    steps: Mapping[str, Step]

    def check(self) -> tuple[Check, ...]:
        """Every comparison with torch and with qkv that was made on the way, in the order of the steps."""
        return tuple(check for step in self.steps.values() for check in step.checks)

    @property
    def agrees(self) -> bool:
        """Whether every comparison lies within its bound."""
        return all(check.passed for check in self.check())

    def mistake(self, name: str) -> Mistake:
        """The weights that a classic mistake of `MISTAKES` gives in place of the right ones."""
        return make_mistake(name, self.setting, self.steps)

    def text(
        self,
        *,
        steps: Sequence[str] | None = None,
        mistake: str | None = None,
        width: int = 80,
        colour: bool = False,
        plain: bool = False,
    ) -> str:
        """The explanation as text of `width` columns: all steps or the named ones, a mistake at the end.

        `colour` paints the tensors by role, `plain` keeps to ASCII. A step or mistake that there is not: UnknownName.
        """
        shown = list(self.steps if steps is None else dict.fromkeys(steps))
        for name in shown:
            if name not in STEP_KEYS:
                raise unknown_name("steps", name, STEP_KEYS)
        chosen = [step for key, step in self.steps.items() if key in shown]
        wrong = None if mistake is None else self.mistake(mistake)
        return render(self.setting, self.steps, chosen, wrong, Style(width=width, colour=colour, plain=plain))

    def to_dict(self) -> dict[str, object]:
        """Everything as lists, numbers and text, ready for JSON; "inf", "-inf" and "nan" where JSON has no number."""
        return record(self.setting, self.steps)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.setting.sizes.items())
        return f"<Explanation {sizes}, steps {' '.join(self.steps)}>"
