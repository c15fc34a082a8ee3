"""Mutants: small changes of what a card guards, under which the card must refuse.

A mutant names a claim and changes one place: the text of one file of the package, the text of one cell
of the claim's chapter, or the stored rows as they are loaded. Running it executes the cells that the claim's
card depends on, in a process of its own that sees the changed copy; nothing on disk changes. If no check on the way
refuses, the mutant has survived, and the check is worth less than it seems.

The mutants of a chapter stand in the file of its name in this folder, what became of them in `outcomes.json`,
which holds as long as cards are judged by the same code, whose hashes are in `judge.txt`.
`python -m moe_book.sabotage list | run [CLAIM ...] | spotcheck SEED | status`.
"""
