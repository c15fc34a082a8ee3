"""The page on names: what `import moe_theory as mt` gives and what chapters use besides, with signatures."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import is_dataclass
from pkgutil import resolve_name

from moe_theory.models.rules import Rule

GROUPS = {
    "Data": ["PatchTask"],
    "Training": ["train_patch_moe"],
    "The layer and its routers": [
        "PatchMoE",
        "LinearRouter",
        "CosineRouter",
        "PerturbedCosineRouter",
        "MultiHeadRouter",
    ],
    "Rules that select experts": ["top1_noisy", "softmax_topk", "topk_softmax", "sampled_topk"],
    "Theory": ["route_probabilities", "tight_witness", "nullity"],
    "What is measured": ["dispatch_entropy", "MixingMeasure", "voronoi_loss"],
    "A model of your own": [
        *("diagnose.diagnose", "diagnose.compare", "diagnose.diagnose_layer", "diagnose.diagnose_router"),
        *("diagnose.diagnose_choices", "diagnose.compare_routers", "diagnose.watch"),
        "diagnose.watch_trainer",
    ],
    "Stored computations": [f"moe_book.experiments.{name}" for name in ("load", "recompute", "status")],
    "Claims": ["moe_book.claims.check"],
}

INTRODUCTIONS = {
    "A model of your own": "Findings, their limits and the claims behind them are explained in "
    "{doc}`../notebooks/26_your_own_moe`. `mt.diagnose.diagnose` needs the library transformers: "
    '`pip install ".[transformers]"`.',
    "Rules that select experts": "`softmax_topk`, `topk_softmax` and `sampled_topk` turn logits into gates: "
    "`mt.topk_softmax(h, k=2)`. The networks of `moe_theory.models.sparse` take one of them as their argument `rule`: "
    "pass the rule itself, `rule=mt.topk_softmax`. Stored rows have its name, and "
    "`moe_theory.models.rules.RULES[name]` is the rule. `top1_noisy` is no such rule: it gives the index of one "
    "expert and no gate.",
}

HEAD = """\
# The package in short

`import moe_theory as mt` gives the names on this page; each is imported when it is first asked for. Shapes stand in the
signatures: `Float[Tensor, 'n P d']` is a tensor of three dimensions. [Notation](notation.md) tells what the letters and
the names of arguments mean. <a href="../_modules/index.html">All modules with their source</a>.

`pip install .` at the root of a clone of the repository installs the library, which is these names and needs PyTorch,
NumPy, SciPy, pandas and jaxtyping; `pip install ".[chapters]"` adds what stored computations and claims need. Bad input
gets a `ValueError` that names the argument, what came and what was expected.

```python
{example}```
"""

EXAMPLE = """\
import torch

import moe_theory as mt
from moe_book import experiments

task = mt.PatchTask(K=4, d=50)
train, test = task.sample(1_000, seed=1), task.sample(1_000, seed=2)
(run,) = mt.train_patch_moe(train, test, steps=200)
print(run.history[-1]["test_accuracy"], run.history[-1]["dispatch_entropy"])

h = torch.tensor([0.3, 0.1, 0.0])
print(mt.topk_softmax(h, k=2), mt.route_probabilities(h, noise="gaussian"))

rows = experiments.load("moe_tables")
print(rows.groupby("activation")["final_test"].mean())
"""
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:[ ]{4}.*\n?|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)*): ")


def _section(match: re.Match) -> str:
    """A section of a docstring, `Args:` and indented entries, as a list."""
    entries = re.sub(r"\n[ ]{8}", " ", match[2])  # an entry goes on where the indent is deeper
    lines = [ENTRY.sub(r"**\g<names>**: ", line.strip()) for line in entries.strip().split("\n")]
    return f"*{match[1]}*\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n"


def markdown(docstring: str) -> str:
    """A docstring as Markdown."""
    return SECTION.sub(_section, inspect.cleandoc(docstring) + "\n").strip()


def _parameters(of: ast.arguments) -> list[str]:
    """Parameters as they are written, without `self`."""
    plain = [*of.posonlyargs, *of.args]
    with_defaults = [*zip(plain, [None] * (len(plain) - len(of.defaults)) + of.defaults, strict=True)]
    keywords = [*zip(of.kwonlyargs, of.kw_defaults, strict=True)]
    written = [ast.unparse(a) + (f" = {ast.unparse(value)}" if value else "") for a, value in with_defaults]
    star = [f"*{of.vararg.arg}"] if of.vararg else ["*"] if keywords else []
    written += star + [ast.unparse(a) + (f" = {ast.unparse(value)}" if value else "") for a, value in keywords]
    return [p for p in written if p != "self"] + ([f"**{of.kwarg.arg}"] if of.kwarg else [])


def signature(name: str, obj: Callable) -> str:
    """How a function, class or rule is called, as its source has it: annotations hold shapes."""
    obj = obj.__call__ if isinstance(obj, Rule) else obj
    written = obj.__init__ if inspect.isclass(obj) and not is_dataclass(obj) else obj
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(written))).body
    if isinstance(node, ast.ClassDef):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign) and "init=False" not in ast.unparse(n)]
        parameters, returns = [ast.unparse(n) for n in fields], ""
    else:
        assert isinstance(node, ast.FunctionDef)
        parameters = _parameters(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns and not inspect.isclass(obj) else ""
    line = f"{name}({', '.join(parameters)}){returns}"
    return line if len(line) <= 79 else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){returns}"


def _methods(obj) -> list[tuple[str, Callable]]:
    found = vars(obj).items() if inspect.isclass(obj) else ()
    return [(name, f) for name, f in found if inspect.isfunction(f) and name[0] != "_" and f.__doc__]


def shown(name: str) -> str:
    """A name as it is written: with its module, or after `mt`."""
    return name if name.startswith("moe_book.") else f"mt.{name}"


def lookup(name: str):
    """What has that name; it is imported now."""
    return resolve_name(name if name.startswith("moe_book.") else f"moe_theory:{name}")


def entry(name: str) -> str:
    """What the page says of one name."""
    obj, name = lookup(name), shown(name)
    parts = [
        f"### `{name}`",
        f"```python\n{signature(name, obj)}\n```",
        *map(markdown, (obj.about, obj.__call__.__doc__) if isinstance(obj, Rule) else [obj.__doc__]),
    ]
    for method, function in _methods(obj):
        parts += [f"```python\n{signature(f'.{method}', function)}\n```", markdown(function.__doc__)]
    return "\n\n".join(parts)


def page() -> str:
    """The page as MyST Markdown."""
    parts = [HEAD.format(example=EXAMPLE)]
    for title, names in GROUPS.items():
        parts += [f"## {title}", *filter(None, [INTRODUCTIONS.get(title)]), *map(entry, names)]
    return "\n\n".join(parts) + "\n"
