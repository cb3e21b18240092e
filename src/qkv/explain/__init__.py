"""One attention call, explained number by number: steps as data, and their text."""

from qkv.explain.build import explain as explain
from qkv.explain.build import worked_example as worked_example
from qkv.explain.examples import EXAMPLES as EXAMPLES
from qkv.explain.examples import example as example
from qkv.explain.explanation import Explanation as Explanation
from qkv.explain.mistakes import MISTAKES as MISTAKES
from qkv.explain.steps import STEP_KEYS as STEP_KEYS
from qkv.explain.steps import Check as Check
from qkv.explain.steps import Mistake as Mistake
from qkv.explain.steps import Setting as Setting
from qkv.explain.steps import Step as Step
