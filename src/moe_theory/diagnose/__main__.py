"""`python -m moe_theory.diagnose MODEL_OR_FILE`: what is found in a model, in logits or in numbers of experts.

The exit status is 0 where nothing is found, 1 where something is, and 2 for what cannot be looked into.
"""

import json
import logging
import sys
import warnings
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from moe_theory.diagnose import diagnose, diagnose_choices, diagnose_router
from moe_theory.diagnose.report import Report
from moe_theory.diagnose.tiny import batches, library, tiny
from moe_theory.streams import torch_stream

#: What a model is shown where no text is given.
TEXT = """The harbour was quiet when the first boats came in. Two men carried baskets of fish up the stairs, and a woman
with a ledger wrote down what each of them weighed. In 1907 the town had 4,213 inhabitants; a hundred years later it has
fewer than half of that. If f is continuous on a closed interval and changes its sign, it has a root in between: halve
the interval, keep the half with the change, and go on. `for i in range(10): print(i ** 2)` writes ten squares. Der Zug
nach Hamburg hält heute nicht in Celle. She asked what it would cost, and whether it could be done before the winter."""

#: Symbols in a sequence, and sequences of random symbols where there is no tokenizer.
LENGTH, SEQUENCES = 512, 4

#: What a configuration calls the numbers of its layers.
STACKS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")

#: How a name begins that stands for one of the small models of `tiny`, and the names of files end that hold an array.
TINY, ENDINGS = "tiny:", (".npy", ".npz", ".pt", ".safetensors")


class Parser(ArgumentParser):
    """Says in one line what is wrong with its arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> Parser:
    """The arguments of the command."""
    asked = Parser("moe_theory.diagnose", description=__doc__, allow_abbrev=False)
    asked.add_argument(
        "target",
        metavar="MODEL_OR_FILE",
        help="a folder or hub name that transformers loads, tiny:Mixtral or another of its small models, or a file "
        f"({', '.join(ENDINGS)}) with one array: logits (tokens, M), or numbers of experts (tokens, K) or "
        "(tokens, layers, K)",
    )
    asked.add_argument("--layers", type=int, metavar="N", help="of a model the first N layers only")
    asked.add_argument("--text", type=Path, metavar="FILE", help="what the model is shown; a paragraph by default")
    asked.add_argument("--k", type=int, metavar="K", help="experts selected, for logits")
    asked.add_argument("--experts", type=int, metavar="M", help="how many there are, for numbers of experts")
    asked.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    asked.add_argument(
        "--html", nargs="?", const="-", metavar="FILE", help="write the report as a page; print it without FILE"
    )
    return asked


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    asked = parser()
    given = asked.parse_args(arguments)
    try:
        with warnings.catch_warnings(action="ignore"):
            report, of = _report(given)
            _put(report, of, given)
    except Exception as error:  # of whatever kind: the status of what Python ends with is that of a finding
        print(f"{asked.prog}: {_line(error)}", file=sys.stderr)
        return 2
    return int(bool(report))


def _report(given: Namespace) -> tuple[Report, str]:
    """The report that is asked for, and what it is of."""
    if given.json and given.html == "-":
        raise ValueError("--html: expected a file beside --json, got none")
    is_file = given.target.endswith(ENDINGS)
    wrong = ("layers", "text") if is_file else ("k", "experts")
    if strange := [f"--{name}" for name in wrong if getattr(given, name) is not None]:
        raise ValueError(f"{', '.join(strange)}: expected {'a model' if is_file else 'a file'}, got {given.target}")
    if given.layers is not None and given.layers < 1:
        raise ValueError(f"--layers: expected 1 or more, got {given.layers}")
    return _of_file(given) if is_file else _of_model(given)


def _put(report: Report, of: str, given: Namespace) -> None:
    """Prints or writes a report."""
    if given.html == "-":
        print(report.to_html(of))
    elif given.html is not None:
        Path(given.html).write_text(report.to_html(of), encoding="utf-8")
    if given.json:
        print(json.dumps(report.to_dict(of), allow_nan=False))
    elif given.html != "-":
        table = report.layers().to_string(float_format="{:.4g}".format)
        print(f"{of}\n{report}\n\n{table}")


def _of_file(given: Namespace) -> tuple[Report, str]:
    """The report of an array in a file."""
    array = _loaded(given.target, _array, Path(given.target))
    of = f"{given.target}, {array.dtype} {tuple(array.shape)}".replace("torch.", "")
    if array.is_floating_point():
        if given.k is None or given.experts is not None:
            raise ValueError(f"--k: expected the number of experts selected, and no --experts, for the logits in {of}")
        return diagnose_router(array, k=given.k), of
    if given.experts is None or given.k is not None:
        raise ValueError(f"--experts: expected how many there are, and no --k, for the numbers of experts in {of}")
    return diagnose_choices(array, given.experts), of


def _array(path: Path) -> Tensor:
    """The only array in a file.

    Raises:
        ValueError: if there are several, or what is there is none.
    """
    if path.suffix == ".safetensors":
        held: Any = import_module("safetensors.torch").load_file(path)
    elif path.suffix == ".pt":
        held = torch.load(path, map_location="cpu", weights_only=True)
    else:
        held = np.load(path, allow_pickle=False)
    if not isinstance(held, np.ndarray | Tensor):
        named = dict(held)
        if len(named) != 1:
            raise ValueError(f"expected one array, got {', '.join(map(str, named)) or 'none'}")
        held = next(iter(named.values()))
    return torch.as_tensor(held)


def _of_model(given: Namespace) -> tuple[Report, str]:
    """The report of a model and what it was shown."""
    if given.target.startswith(TINY):
        name = given.target.removeprefix(TINY)
        if given.text is not None:
            raise ValueError(f"--text: expected a model with a tokenizer, got {given.target}")
        config = {} if given.layers is None else {"num_hidden_layers": given.layers}
        return diagnose(tiny(name, **config), batches(name, 1)), f"{given.target}, shown 256 random symbols"
    library().utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # which tells of each try to reach the hub
    model = _loaded(given.target, _model, given.target, given.layers)
    shown, said = _shown(model, given)
    cut = "" if given.layers is None else f", its first {given.layers} layers"
    return diagnose(model, shown), f"{given.target}{cut}, shown {said}"


def _model(target: str, layers: int | None) -> nn.Module:
    """A model as it is stored, or its first layers."""
    auto = library()
    config = auto.AutoConfig.from_pretrained(target)
    text = config.get_text_config()
    if layers is not None:
        _cut(text, layers)
    kind = auto.AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto.AutoModelForCausalLM
    return kind.from_pretrained(target, config=config, dtype="auto").eval()


def _cut(config: Any, layers: int) -> None:
    """Leaves the first layers of each stack in a configuration."""
    if not 0 < layers <= config.num_hidden_layers:
        raise ValueError(f"--layers: expected 1 to {config.num_hidden_layers}, got {layers}")
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):  # a list with a word for each layer
        if getattr(config, name, None) is not None:
            with suppress(AttributeError):  # where it follows from other entries
                setattr(config, name, getattr(config, name)[:layers])
    for name in STACKS:
        if getattr(config, name, None) is not None:
            setattr(config, name, min(layers, getattr(config, name)))


def _shown(model: Any, given: Namespace) -> tuple[list[dict[str, Tensor]], str]:
    """Batches for a model, of a sequence each, and what they are: a text, or random symbols if it has no tokenizer."""
    text = TEXT if given.text is None else given.text.read_text(encoding="utf-8")
    try:
        numbers = torch.tensor(library().AutoTokenizer.from_pretrained(given.target)(text)["input_ids"])
        reason = "" if len(numbers) > 1 else "its tokenizer makes nothing of a text"
    except Exception as error:  # whatever the library says about a folder without one
        numbers, reason = torch.tensor([]), _line(error)
    if reason and given.text is not None:
        asked = "some text" if not text.strip() else "a model with a tokenizer"
        got = f"none in {given.text}" if not text.strip() else f"{given.target}; {reason}"
        raise ValueError(f"--text: expected {asked}, got {got}")
    if reason:
        symbols = model.config.get_text_config().vocab_size
        drawn = torch.randint(symbols, (SEQUENCES, 1, LENGTH // SEQUENCES), generator=torch_stream(0, "inputs"))
        parts, said = [*drawn], f"{LENGTH} random symbols, for it has no tokenizer"
    else:
        parts = [*numbers[None].split(LENGTH, 1)]
        said = f"{len(numbers)} symbols of {'a paragraph of its own' if given.text is None else given.text}"
    both = model.config.is_encoder_decoder
    return [{"input_ids": part, **({"decoder_input_ids": part} if both else {})} for part in parts], said


def _loaded(target: str, load, *arguments):
    """What a library makes of a file or a model; ValueError with the first line of what it says where it refuses."""
    try:
        return load(*arguments)
    except Exception as error:  # each library has its own
        raise ValueError(f"{target}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
