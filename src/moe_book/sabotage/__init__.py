"""Sabotage that nobody chose: small changes of what a claim is computed from, under which its box must refuse.

For every claim a population of forty mutants is drawn by a hash of its id: changes of the code that its cells execute
and of the cells (`operators`), of stored runs and of the paper's numbers (`stored`), of which cases are run. Running
one goes on from a fork of the chapter's process (`running`); nothing on disk changes. What became of them lies in one
file a chapter in `outcomes`, and holds as long as the cells, every function that they reach (`tracing`), and what
decides are the same. `equivalent.yml` says of a survivor why no sentence speaks of what it changes.
`python -m moe_book.sabotage list | run [CLAIM ...] | spotcheck SEED | status | score`.
"""
