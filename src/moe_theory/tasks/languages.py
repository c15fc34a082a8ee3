"""Manual pages in five languages, labelled with their section: a stand-in for the multilingual text of Chen et al.

The paper's texts are Sentiment140, RuReviews and French reviews of films. None is at hand, and we know of no published
checksums by which a copy could be told from another. What stands in for them has languages for clusters, too, and a
label that means the same in each.
"""

import re
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moe_theory import _validate as check
from moe_theory.streams import stream
from moe_theory.tasks import text

#: For each language its folder of manual pages and the Debian package that they are taken from.
LANGUAGES = {
    "English": ("", "manpages"),
    "French": ("fr", "manpages-fr"),
    "Russian": ("ru", "manpages-ru"),
    "Spanish": ("es", "manpages-es"),
    "German": ("de", "manpages-de"),
}

#: The classes, by section of the manual: two, as in the paper, of those that all languages have enough pages of.
CLASSES = {"devices and formats": "45", "overviews": "7"}

#: Share of the pages that are held out for the test.
HELD_OUT = 0.25

#: Words in one example; and the most examples of one page, so that no long page stands for a class.
LENGTH, PAGE_WINDOWS = 32, 40

#: Parts of a page, besides those of `text.DROPPED`, that are names, references or credits, in the other languages.
DROPPED = text.DROPPED | {
    *("NOM", "VOIR AUSSI", "TRADUCTION", "AUTEUR", "AUTEURS", "SIGNALER DES BOGUES", "COPYRIGHT"),
    *("ИМЯ", "СМ. ТАКЖЕ", "ПЕРЕВОД", "АВТОРЫ", "АВТОРСКИЕ ПРАВА"),
    *("NOMBRE", "VÉASE TAMBIÉN", "TRADUCCIÓN", "AUTOR", "AUTORES", "INFORMAR DE ERRORES"),
    *("BEZEICHNUNG", "SIEHE AUCH", "ÜBERSETZUNG", "AUTOREN", "FEHLER MELDEN"),
}


class Multilingual(NamedTuple):
    """Examples of 32 words: the texts, their classes (n,), and their languages (n,), which no model is told."""

    texts: list[str]
    y: Int[Tensor, " n"]
    language: Int[Tensor, " n"]


def load_languages(n_train: int, n_test: int, *, seed: int = 0) -> tuple[Multilingual, Multilingual]:
    """Windows of 32 words of manual pages in five languages, equally many of each class in each language.

    A page with all its translations gives windows to one of the two parts only.

    Args:
        n_train, n_test: examples, a multiple of the 10 pairs of a class and a language.
        seed: of the split and of the draw.

    Raises:
        ValueError: the Debian packages are not installed or do not have so many examples, or an argument is out of
            range.
    """
    pairs = len(LANGUAGES) * len(CLASSES)
    for name, n in (("n_train", n_train), ("n_test", n_test)):
        if check.integer(name, n, pairs) % pairs:
            raise ValueError(f"{name}: expected a multiple of the {pairs} pairs of class and language, got {n}")
    windows, rng = _pages(), stream(seed, "texts")
    names = sorted({name for pages in windows.values() for name in pages})
    held_out = {names[i] for i in rng.permutation(len(names))[: round(HELD_OUT * len(names))]}
    drawn, seen = ([], []), set()
    for (language, y), pages in windows.items():
        for part, n in enumerate((n_train // pairs, n_test // pairs)):
            pool = [
                w for name, page in pages.items() if (name in held_out) == bool(part) for w in page if w not in seen
            ]
            pool = list(dict.fromkeys(pool))
            seen.update(pool)
            if len(pool) < n:
                where = f"{list(LANGUAGES)[language]}, {list(CLASSES)[y]!r}"
                raise ValueError(f"n_train, n_test: expected at most the {len(pool)} windows of {where}, got {n}")
            drawn[part].extend((pool[i], y, language) for i in rng.permutation(len(pool))[:n])
    return tuple(_shuffled(part, rng) for part in drawn)


@cache
def _pages() -> dict[tuple[int, int], dict[str, list[str]]]:
    """The windows of every page by its name, for each language and class; ValueError without the packages."""
    found, wanted = {}, "".join(CLASSES.values())
    for i, (folder, package) in enumerate(LANGUAGES.values()):
        sources = text.page_sources(package, language=folder, sections=wanted)
        if not sources:
            packages = " ".join(package for _, package in LANGUAGES.values())
            raise ValueError(
                f"languages: expected the Debian package {package} to be installed, found no page of it (apt-get "
                f"install {packages}; in a slim container, remove the path-exclude lines in /etc/dpkg/dpkg.cfg.d first)"
            )
        for y, sections in enumerate(CLASSES.values()):
            pages = {f.name.split(".gz")[0]: page for f, page in sources.items() if f.parent.name[-1] in sections}
            found[i, y] = {name: _windows(text.strip_roff(page, DROPPED)) for name, page in pages.items()}
    return found


def _windows(page: str) -> list[str]:
    """The first windows of 32 words in lower case, of letters of any alphabet; a rest is dropped."""
    words = re.findall(r"[^\W\d_]+", page.lower())[: LENGTH * PAGE_WINDOWS]
    return [" ".join(words[i : i + LENGTH]) for i in range(0, len(words) - LENGTH + 1, LENGTH)]


def _shuffled(rows: list[tuple[str, int, int]], rng: np.random.Generator) -> Multilingual:
    """The examples in random order."""
    texts, y, language = zip(*(rows[i] for i in rng.permutation(len(rows))), strict=True)
    return Multilingual(list(texts), torch.tensor(y), torch.tensor(language))


def embedded(
    train: list[str], test: list[str], *, d: int = 100, seed: int = 0
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "m d"]]:
    """Texts as d numbers each, without looking at labels: the stand-in for the paper's pretrained multilingual BERT.

    Hashed counts of words, rare ones weighted up, projected onto their first d principal directions, and each number
    brought to mean 0 and variance 1, all learned from the training part, which has more than d texts. The seed is of
    the projection's random start.
    """
    state = int(stream(seed, "start").integers(2**31))
    of_text = check.library("sklearn.feature_extraction.text", "embedded")
    pipe = check.library("sklearn.pipeline", "embedded").make_pipeline(
        of_text.HashingVectorizer(n_features=2**15, norm=None, alternate_sign=False),
        of_text.TfidfTransformer(sublinear_tf=True),
        check.library("sklearn.decomposition", "embedded").TruncatedSVD(check.integer("d", d, 1), random_state=state),
    )
    a, b = pipe.fit_transform(train), pipe.transform(test)
    mean, sd = a.mean(0), a.std()
    return tuple(torch.from_numpy((z - mean) / sd).float() for z in (a, b))
