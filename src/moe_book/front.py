"""The training that the front page plays."""

import json

import numpy as np

from moe_book import experiments
from moe_theory.tasks.patches import SETTINGS
from moe_theory.theory.smoothing import route_probabilities


def training() -> str:
    """The place of the figure that plays it, with its numbers: the first cubic run of the second figure of chapter 5.

    They are the steps (T), the largest inner product over an expert's filters with a cluster's label signal (T, K, M),
    and the exact probability, under the routing noise, that an expert gets an input that is a cluster's centre at its
    mean strength and nothing else (T, K, M).
    """
    run = experiments.load("inner_products").query("activation == 'cubic'").iloc[0]
    learned, router = (np.array(run[column]).swapaxes(1, 2) for column in ("expert_v", "router_c"))
    sent = route_probabilities(np.mean(SETTINGS[run.setting]["beta"]) * router, "uniform").numpy()
    told = {"steps": list(run.steps_at), "learned": learned.round(3).tolist(), "sent": sent.round(3).tolist()}
    return f'<div class="explorable" data-explorable="training" data-run=\'{json.dumps(told)}\'></div>\n'
