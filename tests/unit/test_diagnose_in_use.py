"""Reports as data and as a page, the command, and what is read while a model trains."""

import json
import math
import pickle
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from moe_theory.diagnose import Report, diagnose, diagnose_router, training
from moe_theory.diagnose.__main__ import main
from moe_theory.diagnose.traces import layers_of
from moe_theory.diagnose.training import RouterState, added_coefficient, watch, watch_trainer
from moe_theory.models.rules import topk_set


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def tiny():
    pytest.importorskip("transformers")
    from moe_theory.diagnose import tiny

    return tiny


@pytest.fixture(scope="module")
def report(tiny):
    model = tiny.tiny("Qwen2-MoE")
    tiny.FAULTS["masked expert"].breaks(model)
    return diagnose(model, tiny.batches("Qwen2-MoE", 1))


def collapsed():
    """One expert of 16 is ahead by 4: nearly all tokens are sent to it, and to no two others alike."""
    h = randn(4000, 16)
    h[:, 3] += 4
    return diagnose_router(h, k=1)


# Reports.


def test_a_report_is_the_same_after_json(report):
    told = report.to_dict("a model")
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["of"] == "a model" and told["found"] == sorted(report.named) and told["tokens"] == 256
    assert [row["claim"] for row in told["findings"]] == [finding.claim for finding in report.findings]
    assert [layer["where"] for layer in told["layers"]] == [*report.routers]
    assert told["versions"]["torch"] == torch.__version__ and told["unasked"] == report.unasked
    for layer, router in zip(told["layers"], report.routers.values(), strict=True):
        assert layer["loads"] == [*router.loads] and layer["effective"] == router.effective and layer["dead"] == [0]
        assert layer["gate"]["name"] == "softmax_topk" and set(layer["found"]) == {"dead", "selection"}
    assert [loss["coefficient"] for loss in told["balance"]] == [loss.coefficient for loss in report.balance]


def test_numbers_that_are_none_are_null():
    told = diagnose_router(randn(50, 4), k=1).to_dict()
    assert told["layers"][0]["gauge"] is None and told["layers"][0]["gate"] is None and not told["findings"]


def test_a_report_says_in_words_how_much_it_saw_and_did_not_ask(report):
    said = repr(report)
    assert said.startswith("Report(2 layers, 256 tokens, found: dead, ") and said.endswith(")")
    assert "not asked: whether a training step adds the balancing loss; " in said and "hand over labels" not in said
    sound = Report({"router": diagnose_router(randn(50, 4), k=1).router})
    assert repr(sound) == "Report(1 layer, 50 tokens, found: nothing)" == str(sound)
    assert not sound and not len(sound.table())


def test_a_collapsed_router_is_printed_with_its_finding():
    said = str(collapsed())
    assert "found: collapse" in said and "\ncollapse: few experts get most of the tokens\n    router: " in said
    assert said.count("to do: ") == 1


def test_print_names_the_first_layers_of_many():
    router = diagnose_router(torch.zeros(200, 4), k=1).router
    many = Report({f"layer {i}": replace(router, where=f"layer {i}") for i in range(9)})
    lines = str(many).splitlines()
    kinds = len(router.findings)
    assert kinds > 1 and sum("layer 3: " in line for line in lines) == kinds
    assert not any("layer 4: " in line for line in lines)
    assert lines.count("    and 5 more, see table()") == kinds


def test_layers_have_no_column_for_what_was_not_asked(report):
    bare = Report(report.routers)
    asked, left = report.layers(), bare.layers()
    assert {"gate", "slope", "learns", "common shift"} <= {*asked.columns}
    assert not {"gate", "slope", "learns"} & {*left.columns}
    assert left.equals(asked[left.columns])
    assert "common shift" not in diagnose_router(randn(50, 4), k=1).layers()


def test_the_only_router_is_at_hand(report):
    of_logits = diagnose_router(randn(50, 4), k=1)
    assert of_logits.router is of_logits.routers["router"]


def test_bad_requests_for_the_only_router_are_named(report):
    with pytest.raises(ValueError, match="router: expected the report of one router, got one of 2; see routers"):
        _ = report.router


# The page.


class Page(HTMLParser):
    """Reads a page: its elements in order, the text in each kind, and whether all that is opened is closed."""

    VOID = frozenset({"meta", "link", "br", "path"})

    def __init__(self, text: str):
        super().__init__()
        self.open, self.seen, self.said = [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert tag in self.VOID or self.open.pop() == tag, tag

    def handle_data(self, data):
        for tag in self.open:
            self.said[tag] = self.said.get(tag, "") + data

    def all(self, tag):
        return [attrs for name, attrs in self.seen if name == tag]


def heights(path: str) -> dict[int, float]:
    """By its place the height of each bar of a drawing."""
    bars = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)h[\d.]+V\2z", path)
    assert len(bars) == path.count("M")
    return {int(float(x)): float(bottom) - float(top) for x, bottom, top in bars}


def test_a_page_needs_nothing_from_elsewhere_and_says_what_it_shows(report):
    text = report.to_html("a <model> & more")
    page = Page(text)
    assert not re.search(r"https?:|//|url\(|@import|<script|src=", text)
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert re.findall(r"<svg[^>]*>(?!<title>[^<]{20,}</title>)", text) == []
    assert "<model>" not in text and "Routers of a <model> & more" in page.said["h1"]
    assert "Found: dead" in page.said["p"] and all(line in page.said["li"] for line in report.unasked)
    for section in ("Load by layer", "Gaps by layer", "Gates by layer", "Balancing loss", "Not asked"):
        assert section in page.said["h2"]


def test_bars_are_as_high_as_the_loads(report):
    bars = [attrs["d"] for attrs in Page(report.to_html()).all("path") if attrs["class"] == "bars"]
    for path, router in zip(bars, report.routers.values(), strict=False):
        drawn = heights(path)
        expected = {m: 8 * load for m, load in enumerate(router.loads) if load}
        assert drawn == pytest.approx(expected, abs=2e-3) and 0 not in drawn
    top = max(2.0, 8 * max(max(router.loads) for router in report.routers.values()))
    assert f'class="mark" d="M0 {top - 1:g}H8"' in report.to_html()  # the uniform load, from above


def test_what_is_far_beyond_the_uniform_load_ends_at_the_top():
    text = collapsed().to_html()
    assert "from 0 to 4 times. A bar that reaches the top goes beyond it." in text
    path = next(attrs["d"] for attrs in Page(text).all("path") if attrs["class"] == "bars")
    assert max(heights(path).values()) == 4


def test_the_histogram_of_gaps_is_the_one_of_the_report(report):
    paths = [attrs["d"] for attrs in Page(report.to_html()).all("path") if attrs["class"] == "bars"]
    counts = [router.gaps.counts for router in report.routers.values()]
    assert len(paths) == 2 * len(counts)
    for path, own in zip(paths[len(counts) :], counts, strict=True):
        assert [*heights(path).values()] == pytest.approx([c / max(own) for c in own if c], abs=2e-3)


def test_the_gate_that_fits_is_drawn_within_its_limit(report):
    text = report.to_html()
    for gates in report.gates.values():
        for name, off in gates.off.items():
            kind = "dot fits" if off <= 1 else "dot"
            assert re.search(rf'class="{kind}" d="M[\d.]+ \.5h\.001"><title>{re.escape(name)}: ', text)
    at = {kind: [float(x) for x in re.findall(rf'class="{kind}" d="M([\d.]+) ', text)] for kind in ("dot fits", "dot")}
    assert max(at["dot fits"]) <= 3 < min(at["dot"])  # the limit is three decades from the left
    assert text.count('class="mark" d="M3 0V1"') == 2


def test_a_page_of_choices_or_nothing_is_one_too():
    text = diagnose_router(randn(50, 4), k=1).to_html()
    assert "Nothing found." in Page(text).said["p"] and "Gates by layer" not in text


@pytest.fixture(scope="module")
def browser():
    """Chromium that refuses every request that leaves the machine."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    sync = pytest.importorskip("playwright.sync_api")
    if path is None:
        pytest.skip("Chromium is not installed")
    with sync.sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND"]
        )
        yield chromium
        chromium.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_page_opens_on_every_screen(report, browser, tmp_path, width, scheme):
    """Without an error or a request; it is not wider than the screen, and no text is smaller than 12 pixels."""
    (tmp_path / "report.html").write_text(report.to_html("tiny"), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors, asked = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"file://{tmp_path}/report.html")
    assert not errors and [url for url in asked if not url.startswith("data:")] == [f"file://{tmp_path}/report.html"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = "[...document.querySelectorAll('main *')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    assert min(page.evaluate(sizes)) >= 12
    drawn = page.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)")
    assert min(drawn) >= min(300, width - 60)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 23, 26)"
    assert dark is (scheme == "dark")
    page.close()


# The command.


@pytest.fixture
def logits(tmp_path):
    path = tmp_path / "logits.npy"
    np.save(path, randn(300, 6).numpy())
    return path


def test_the_exit_status_says_whether_anything_was_found(logits, tmp_path, capsys):
    assert main([str(logits), "--k", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{logits}, float64 (300, 6)\nReport(1 layer, 300 tokens, found: nothing")
    np.save(tmp_path / "zeros.npy", np.zeros((300, 6)))
    assert main([str(tmp_path / "zeros.npy"), "--k", "2"]) == 1
    assert "\ndead: " in capsys.readouterr().out


def test_json_is_all_that_is_printed(logits, capsys):
    assert main([str(logits), "--k", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    array = torch.from_numpy(np.load(logits))
    assert told == diagnose_router(array, k=2).to_dict(f"{logits}, float64 (300, 6)")


def test_the_page_is_printed_or_written(logits, tmp_path, capsys):
    assert main([str(logits), "--k", "2", "--html"]) == 0
    printed = capsys.readouterr().out
    assert main([str(logits), "--k", "2", "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == printed.removesuffix("\n")


def test_an_array_is_read_from_every_kind_of_file(logits, tmp_path, capsys):
    array = np.load(logits)
    np.savez(tmp_path / "a.npz", h=array)
    torch.save(torch.from_numpy(array), tmp_path / "a.pt")
    pytest.importorskip("safetensors.torch").save_file({"h": torch.from_numpy(array)}, tmp_path / "a.safetensors")
    found = []
    for path in (logits, *(tmp_path / f"a.{ending}" for ending in ("npz", "pt", "safetensors"))):
        assert main([str(path), "--k", "2", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out) | {"of": ""})
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("shape", [(400, 2), (400, 3, 2)])
def test_numbers_of_experts_are_taken(tmp_path, capsys, shape):
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.broadcast_to(np.arange(5), (*shape[:-1], 5)), axis=-1)[..., :2]
    np.save(tmp_path / "numbers.npy", drawn)
    assert main([str(tmp_path / "numbers.npy"), "--experts", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    loads = np.array([layer["loads"] for layer in told["layers"]])
    per_layer = drawn.reshape(400, -1, 2).swapaxes(0, 1).reshape(len(loads), -1)
    assert loads == pytest.approx(np.stack([np.bincount(own, minlength=5) / own.size for own in per_layer]))
    assert main([str(tmp_path / "numbers.npy"), "--experts", "9"]) == 1


WRONG = [
    (["LOGITS"], "--k: expected the number of experts selected, and no --experts, for the logits"),
    (["LOGITS", "--k", "2", "--experts", "6"], "--k: expected the number"),
    (["LOGITS", "--k", "7"], "k: expected at most M = 6 experts, got 7"),
    (["LOGITS", "--k", "two"], "argument --k: invalid int value: 'two'"),
    (["LOGITS", "--k", "2", "--layers", "1"], "--layers: expected a model, got"),
    (["LOGITS", "--k", "2", "--json", "--html"], "--html: expected a file beside --json, got none"),
    (["NUMBERS"], "--experts: expected how many there are"),
    (["NUMBERS", "--experts", "4", "--k", "2"], "--experts: expected how many"),
    (["TWO", "--k", "1"], "expected one array, got a, b"),
    (["BROKEN", "--k", "1"], "broken.pt: "),
    (["nowhere.npy", "--k", "1"], "nowhere.npy: [Errno 2] No such file"),
    (["tiny:Mixtral", "--k", "2"], "--k: expected a file, got tiny:Mixtral"),
    (["tiny:Mixtral", "--text", "x"], "--text: expected a model with a tokenizer, got tiny:Mixtral"),
    (["tiny:Other"], "family: expected one of ["),
    ([], "the following arguments are required: MODEL_OR_FILE"),
    (["LOGITS", "--strange"], "unrecognized arguments: --strange"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_bad_use_is_named_in_one_line(tiny, logits, tmp_path, capsys, arguments, message):
    np.save(tmp_path / "numbers.npy", np.arange(6).reshape(3, 2))
    np.savez(tmp_path / "two.npz", a=np.zeros(3), b=np.zeros(3))
    (tmp_path / "broken.pt").write_bytes(b"no archive\n")
    files = {"LOGITS": "logits.npy", "NUMBERS": "numbers.npy", "TWO": "two.npz", "BROKEN": "broken.pt"}
    try:
        status = main([str(tmp_path / files[word]) if word in files else word for word in arguments])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr()
    assert status == 2 and not said.out and said.err.count("\n") == 1
    assert said.err.startswith("moe_theory.diagnose: ") and message in said.err


@pytest.mark.slow
def test_the_command_runs_by_its_name(tiny, logits):
    def run(*arguments):
        command = [sys.executable, "-m", "moe_theory.diagnose", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    sound, broken, wrong = run("tiny:Mixtral"), run("tiny:Switch", "--json"), run("tiny:Mixtral", "--k", "3")
    assert (sound.returncode, wrong.returncode) == (0, 2) and not sound.stderr
    assert "tiny:Mixtral, shown 256 random symbols" in sound.stdout and "topk_softmax" in sound.stdout
    told = json.loads(broken.stdout)
    assert broken.returncode == int(bool(told["found"])) and len(told["layers"]) == 2
    assert wrong.stderr == "moe_theory.diagnose: --k: expected a file, got tiny:Mixtral\n" and not wrong.stdout
    assert run(str(logits), "--k", "9").returncode == 2


@pytest.fixture(scope="module")
def stored(tiny, tmp_path_factory):
    """A folder with a model of two layers in half precision, and one with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny.tiny("Mixtral").to(torch.bfloat16)
    model.save_pretrained(folder / "bare")
    model.save_pretrained(folder / "whole")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", *"abcdefghij"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "whole")
    return folder


@pytest.mark.slow
def test_a_model_is_read_from_a_folder(stored, tmp_path, capsys):
    """As it is stored, its first layer alone, and with a text of 600 words, which are two sequences."""
    main([str(stored / "bare"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["of"] == f"{stored / 'bare'}, shown 512 random symbols, for it has no tokenizer"
    assert len(told["layers"]) == 2 and told["tokens"] == 512
    (tmp_path / "text").write_text("a b c d e f " * 100)
    main([str(stored / "whole"), "--layers", "1", "--text", str(tmp_path / "text"), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["of"] == f"{stored / 'whole'}, its first 1 layers, shown 600 symbols of {tmp_path / 'text'}"
    assert len(told["layers"]) == 1 and told["tokens"] == 600
    main([str(stored / "whole"), "--json"])
    assert re.search(r"shown \d+ symbols of a paragraph of its own$", json.loads(capsys.readouterr().out)["of"])


@pytest.mark.slow
def test_the_first_layers_are_those_of_each_stack(tiny, tmp_path, capsys):
    """Of encoder and decoder; where no layer of one has experts, its loss cannot be computed, and the rest is read."""
    sizes = {"num_layers": 4, "num_decoder_layers": 4, "num_sparse_decoder_layers": 2}
    tiny.tiny("Switch", **sizes, num_sparse_encoder_layers=2).save_pretrained(tmp_path / "both")
    tiny.tiny("Switch", **sizes, num_sparse_encoder_layers=4).save_pretrained(tmp_path / "one")
    for name, layers, stacks in (("both", "2", ["encoder", "decoder"]), ("one", "1", ["encoder"])):
        status = main([str(tmp_path / name), "--layers", layers, "--json"])
        told = json.loads(capsys.readouterr().out)
        assert [layer["where"].partition(".")[0] for layer in told["layers"]] == stacks
        assert status == int(bool(told["found"]))
    assert [f["name"] for f in told["findings"] if "cannot be computed" in f["detail"]] == ["balance"]
    assert main([str(tmp_path / "both"), "--layers", "5"]) == 2
    assert "--layers: expected 1 to 4, got 5" in capsys.readouterr().err
    assert main([str(tmp_path / "both"), "--layers", "1"]) == 2
    assert "expected mixture layers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bare", "--text", "TEXT"], "--text: expected a model with a tokenizer, got "),
        (["bare", "--layers", "3"], "--layers: expected 1 to 2, got 3"),
        (["whole", "--text", "EMPTY"], "--text: expected some text, got none in "),
        (["whole", "--text", "nowhere"], "No such file or directory: 'nowhere'"),
        (["."], "config.json"),
    ],
)
def test_bad_folders_and_texts_are_named(stored, tmp_path, capsys, monkeypatch, arguments, message):
    (tmp_path / "TEXT").write_text("a b c")
    (tmp_path / "EMPTY").write_text("")
    monkeypatch.chdir(tmp_path)
    folder, *others = arguments
    assert main([str(stored / folder), *others]) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert said.err.splitlines()[-1].startswith("moe_theory.diagnose: ")


# While a model trains.


def left_behind(model):
    """The hooks of the package that a model still has."""
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return [hook for hook in hooks if hook.__module__.startswith("moe_theory")]


def of_logits(model, batch, kept=slice(None)):
    """Loads of the largest logits that the model itself returns, layer by layer."""
    output = model(**batch, output_router_logits=True)
    return [topk_set(h.detach()[kept], 2).double().mean(0) / 2 for h in output.router_logits]


def read(model, batch, *, every=1, times=1, **more):
    """The states that `watch` logs while a model is called and differentiated some times."""
    found = []
    with watch(model, log=found.append, every=every):
        for _ in range(times):
            model(**batch, **({"labels": batch["input_ids"]} if "labels" not in batch else {}), **more).loss.backward()
    return found


def test_what_is_logged_is_what_the_logits_say(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    (state,) = read(model, batch)
    scalars = state.scalars()
    for i, loads in enumerate(of_logits(model, batch)):
        assert scalars[f"moe/effective/layer_{i}"] == pytest.approx(1 / float(loads.square().sum()))
        assert scalars[f"moe/violation/layer_{i}"] == pytest.approx(8 * float(loads.max()) - 1)
        assert scalars[f"moe/idle/layer_{i}"] == int((loads == 0).sum())
        assert scalars[f"moe/dropped/layer_{i}"] == 0 and 0 <= scalars[f"moe/flips/layer_{i}"] < 1e-4
    assert all(type(value) is float for value in scalars.values())


def test_one_of_so_many_steps_is_read_and_no_evaluation(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    found = []
    with watch(model, log=found.append, every=2):
        for _ in range(3):
            model(**batch)
            with torch.no_grad():
                model(**batch)
            model.eval()(**batch)
            model.train()
    assert [tally.tokens for state in found for tally in state.routers.values()] == [256] * 4
    assert not left_behind(model)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_is_counted_once(tiny, reentrant):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    expected = read(model, batch)[0].scalars()
    with warnings.catch_warnings(action="ignore"):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    runs = []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: runs.append(1))
    (state,) = read(model, batch)
    assert len(runs) == 2 and state.scalars() == expected
    assert [tally.tokens for tally in state.routers.values()] == [256, 256]


def test_flips_are_the_ties_of_the_logits_as_they_are(tiny):
    """A set with t equal logits at the cut, a of them selected, is the one before rounding once in C(t, a)."""
    model = tiny.tiny("Mixtral", k=6, num_local_experts=48).to(torch.bfloat16).train()
    (batch,) = tiny.batches("Mixtral", 1)
    flips = []
    for h in model(**batch, output_router_logits=True).router_logits:
        cut = h.topk(7, 1).values[:, 5:]
        tied, above = (h == cut[:, :1]).sum(1), (h > cut[:, :1]).sum(1)
        ways = [math.comb(t, 6 - a) if one == other else 1 for (one, other), t, a in zip(cut, tied, above, strict=True)]
        flips.append(1 - sum(1 / way for way in ways) / len(ways))
    scalars = read(model, batch)[0].scalars()
    assert min(flips) > 0
    assert [scalars[f"moe/flips/layer_{i}"] for i in range(2)] == pytest.approx(flips, rel=1e-9)
    single = read(model.float(), batch)[0].scalars()
    assert single["moe/flips/layer_0"] < 1e-3 < scalars["moe/flips/layer_0"]


@pytest.fixture
def grouped(tiny):
    """A model that selects by a bias and in groups, a batch, and its first layer."""
    from moe_theory.diagnose import families

    model = families.build("deepseek_v3", "one of two groups").train()
    layer = layers_of(model)[0]
    layer.router.e_score_correction_bias.copy_(0.2 * randn(layer.M))
    assert layer.bias is not None and layer.groups is not None
    return model, families.batch("deepseek_v3"), layer


def test_a_router_that_selects_by_more_than_its_logits_is_read_by_that(grouped):
    """Loads are those of the experts handed on, and none of them is taken for a mistake."""
    model, batch, layer = grouped
    handed = []
    layer.experts.register_forward_pre_hook(lambda _, args: handed.append(args[1]))
    (state,) = read(model, batch)
    tally = state.routers[layer.name]
    assert tally.loads.tolist() == torch.bincount(handed[0].flatten(), minlength=layer.M).tolist()
    assert tally.tokens == len(handed[0]) and tally.flips < 1e-2


def test_a_bias_is_read_as_it_is_in_each_step(grouped, monkeypatch):
    """It is 0 in the first step, as before training, and by which scores experts are selected cannot be told then."""
    model, batch, layer = grouped
    bias, found, asked = layer.router.e_score_correction_bias, [], []
    of = training.flipped
    monkeypatch.setattr(training, "flipped", lambda h, rule, k: asked.append(rule) or of(h, rule, k))
    biases = [scale * randn(layer.M).float() for scale in (0.0, 0.2, 0.4)]
    with watch(model, log=found.append, every=1):
        for values in biases:
            bias.copy_(values)
            model(**batch)
            assert torch.equal(asked[-2].bias, values)
    assert len({tuple(state.routers[layer.name].loads.tolist()) for state in found}) == 3
    assert [rule.score for rule in asked[2::2]] == ["sigmoid"] * 2


def test_flips_of_biased_scores_are_those_of_random_roundings(grouped):
    """The logits are rounded to half precision, and drawn again from all that round to them."""
    model, _, layer = grouped
    batch = {"input_ids": torch.randint(64, (128, 32), generator=torch.Generator().manual_seed(0))}
    h = []
    layer.router.register_forward_hook(lambda _, __, out: (out[0].bfloat16(), *out[1:]))
    layer.router.register_forward_hook(lambda _, __, out: h.append(out[0].detach()))
    (state,) = read(model, batch)
    scores = torch.sigmoid(h[0].double()) + layer.bias
    halves = scores.unflatten(1, (2, 4)).topk(2, -1).values.sum(-1)
    outside = (halves < halves.amax(1, keepdim=True)).repeat_interleave(4, 1)
    unit = (torch.nextafter(h[0].abs(), torch.tensor(torch.inf).bfloat16()) - h[0].abs()).double()
    noise = torch.rand(200, *scores.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    drawn = torch.sigmoid(h[0].double() + unit * noise) + layer.bias
    sets = (topk_set(s.masked_fill(outside, -torch.inf), 2) for s in (drawn, scores))
    share = float(torch.ne(*sets).any(-1).double().mean())
    assert share > 1e-4
    assert state.routers[layer.name].flips / len(scores) == pytest.approx(share, rel=0.1)


def test_padding_is_left_out(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    mask = torch.ones_like(batch["input_ids"])
    mask[:4, 20:] = 0
    batch = batch | {"attention_mask": mask}
    (state,) = read(model, batch)
    loads = of_logits(model, batch, mask.flatten().bool())
    for own, tally in zip(loads, state.routers.values(), strict=True):
        assert tally.tokens == 8 * 32 - 4 * 12
        assert (tally.loads / tally.loads.sum()).tolist() == pytest.approx(own.tolist())


@pytest.mark.parametrize("family", ["Mixtral", "Switch"])
def test_shards_add_up_to_the_whole(tiny, family):
    config = {"router_jitter_noise": 0.0} if family == "Switch" else {}
    model, (batch,) = tiny.tiny(family, **config).train(), tiny.batches(family, 1)
    labels = {"labels": batch.get("decoder_input_ids", batch["input_ids"])}
    (whole,) = read(model, batch | labels)
    parts = slice(0, 3), slice(3, 8)
    shards = [read(model, {name: value[part] for name, value in (batch | labels).items()})[0] for part in parts]
    assert shards[0].scalars() != shards[1].scalars()
    assert sum(shards[1:], shards[0]).scalars() == pytest.approx(whole.scalars(), rel=1e-12)
    assert pickle.loads(pickle.dumps(whole)).scalars() == whole.scalars()  # as it comes from another process


def test_a_shard_without_a_router_adds_nothing(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    (whole,) = read(model, batch)
    first, *_ = whole.routers
    part = RouterState({first: whole.routers[first]}, whole.configured, whole.added)
    both = part + whole
    assert [tally.tokens for tally in both.routers.values()] == [512, 256]
    assert both.scalars()["moe/effective/layer_1"] == whole.scalars()["moe/effective/layer_1"]


def test_the_coefficient_is_the_one_in_the_loss(tiny):
    """Switched off, on, and on with another one; in a loss that is made single after it was added in half precision."""
    for config, added in (({}, 0.0), ({"output_router_logits": True}, 0.001)):
        model, (batch,) = tiny.tiny("Mixtral", **config).train(), tiny.batches("Mixtral", 1)
        scalars = read(model, batch)[0].scalars()
        assert scalars["moe/coefficient/configured"] == 0.001
        assert scalars["moe/coefficient/added"] == pytest.approx(added)
    part = torch.ones(1, requires_grad=True).bfloat16().sum() * 3
    output = {"loss": (7 + 0.5 * part).float(), "aux_loss": part.float()}
    assert added_coefficient(output, 0.5) == 0.5
    assert added_coefficient(output | {"loss": torch.ones(1, requires_grad=True) * 2}, 0.5) == 0
    assert math.isnan(added_coefficient({"loss": None}, 0.5)) and math.isnan(added_coefficient((1,), 0.5))


def test_the_gradients_are_those_without_it(tiny):
    model, (batch,) = tiny.tiny("Mixtral", output_router_logits=True).train(), tiny.batches("Mixtral", 1)

    def gradients():
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    with watch(model, log=lambda state: None, every=1):
        assert all(torch.equal(one, other) for one, other in zip(gradients(), plain, strict=True))


def test_an_error_becomes_one_warning_and_the_training_goes_on(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)

    def log(state):
        raise RuntimeError("the disk is full")

    with (
        pytest.warns(UserWarning, match="routers are read no more; RuntimeError: the disk is full") as told,
        watch(model, log=log, every=1),
    ):
        for _ in range(3):
            model(**batch, labels=batch["input_ids"]).loss.backward()
    assert len(told) == 1 and not left_behind(model)


def test_an_error_inside_a_layer_becomes_one_warning(tiny, monkeypatch):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    monkeypatch.setattr(training, "flipped", lambda *_: 1 // 0)
    with pytest.warns(UserWarning, match="routers are read no more; ZeroDivisionError: ") as told:
        assert not read(model, batch, times=2)
    assert len(told) == 1 and not left_behind(model)


def test_logits_that_are_none_have_no_flips(tiny):
    model, (batch,) = tiny.tiny("Mixtral").train(), tiny.batches("Mixtral", 1)
    model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: (out[0] * math.nan, *out[1:]))
    (state,) = read(model, batch)
    assert {"moe/flips/layer_0", "moe/effective/layer_1"} <= state.scalars().keys()
    assert "moe/flips/layer_1" not in state.scalars()


def test_bad_models_and_steps_are_named(tiny):
    with pytest.raises(ValueError, match="every: expected an integer >= 1, got 0"), watch(None, log=print, every=0):
        pass
    with pytest.raises(ValueError, match="expected a model of transformers"), watch(torch.nn.Linear(1, 1), log=print):
        pass
    with pytest.raises(ValueError, match="every: expected an integer >= 1, got 0"):
        watch_trainer(None, every=0)


@pytest.mark.slow
def test_a_trainer_logs_what_its_routers_do(tiny, tmp_path):
    """Those that report see it, though they come before what is added; a step of two batches is read as one."""
    pytest.importorskip("accelerate")
    import transformers

    (batch,) = tiny.batches("Mixtral", 1)
    rows = [{"input_ids": row, "labels": row} for row in batch["input_ids"]]
    model = tiny.tiny("Mixtral", output_router_logits=True)
    expected = read(model.train(), batch)[0].scalars()
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    arguments = transformers.TrainingArguments(
        **dict(output_dir=str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=4, use_cpu=True),
        **dict(gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1, report_to=[], save_strategy="no"),
        **dict(disable_tqdm=True),
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[Reporter()])
    watch_trainer(trainer, every=2)
    trainer.train()
    trained = [logs for logs in seen if "loss" in logs]
    assert [any(name.startswith("moe/") for name in logs) for logs in trained] == [True, False, True]
    assert {name: trained[0][name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert not any(name.startswith("moe/") for logs in seen if "loss" not in logs for name in logs)
    history = [logs for logs in trainer.state.log_history if "loss" in logs]
    assert {name: history[0][name] for name in expected} == {name: trained[0][name] for name in expected}
    assert not left_behind(model)


@pytest.mark.slow
def test_a_trainer_of_another_model_trains_with_a_warning(tiny, tmp_path):
    pytest.importorskip("accelerate")
    import transformers

    config = transformers.LlamaConfig(**tiny.COMMON, intermediate_size=48)
    rows = [{"input_ids": row, "labels": row} for row in tiny.batches("Mixtral", 1)[0]["input_ids"]]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=rows)
    watch_trainer(trainer)
    with pytest.warns(UserWarning, match="routers are not read; model: expected a model of transformers with mixture"):
        assert trainer.train().global_step == 1


# Adapters.

ADAPTED = {
    "router": dict(target_parameters=["gate.weight"]),
    "experts": dict(target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "both": dict(target_parameters=["gate.weight", "experts.gate_up_proj"]),
    "attention": dict(target_modules=["o_proj"]),
}


@pytest.fixture(params=["mixtral", "qwen2_moe", "deepseek_v3"])
def adapted(request, tiny):
    """A function that puts an adapter of rank two on a part of a model, with weights that are drawn."""
    peft = pytest.importorskip("peft")
    from moe_theory.diagnose import families

    def made(part):
        with warnings.catch_warnings(action="ignore"):
            config = peft.LoraConfig(r=2, lora_alpha=2, **{"target_modules": [], **ADAPTED[part]})
            model = peft.get_peft_model(families.build(request.param), config)
        families.draw_weights(model, 0)
        assert sum("lora_" in name for name, _ in model.named_parameters())
        return model.eval(), families.batch(request.param)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("part", ["experts", "attention"])
def test_adapters_beside_the_router_are_no_fault(adapted, part):
    """Where experts learn and no router does, that is said, and nothing else."""
    model, batch = adapted(part)
    report = diagnose(model, batch)
    assert report.named == ({"frozen"} if part == "experts" else set())
    assert all(len(gates.gates) == 1 for gates in report.gates.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", ["router", "both"])
def test_adapters_of_the_router_are_no_fault(adapted, part):
    """Its vectors are those that act: the logits are not those of the vectors without the adapter."""
    model, batch = adapted(part)
    report = diagnose(model, batch)
    assert not report and all(gates.learns for gates in report.gates.values())
    with model.disable_adapter(), torch.no_grad():
        bare = model(**batch).logits
    assert (model(**batch).logits - bare).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("part", ADAPTED)
def test_adapted_models_are_read_while_they_train(adapted, part):
    model, batch = adapted(part)
    (state,) = read(model.train(), batch)
    assert [tally.tokens for tally in state.routers.values()] == [batch["input_ids"].numel()] * 2
