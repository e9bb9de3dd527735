"""Stored rollouts in the formats of others. Pure functions from rows and calls to values; the command line writes the files.

    template.py    a chat template, rendered
    marks.py       what a template puts around each message, and texts cut at it
    chat.py        chat messages, for supervised training
    atif.py        ATIF 1.8, Harbor's trajectory format
    sequences.py   token sequences with mask, logprobs and advantage: what `trl.py` and `verl.py` name as those libraries do

Texts are the decoded tokens, those that the engine was given and those that it sampled, cut where the policy's own template puts its marks.
Nothing is made up: tool definitions and tool calls stay in the words of the template unless a format has a place for them.
"""
