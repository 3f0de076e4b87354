"""The messages of the control protocol: frozen, validated on receipt, bounded.

docs/protocol.md says who sends which message to whom; in short, for one request:

    gateway → P   Prefill            P → gateway   Timings, Tokens (the first), Finished | Failed | Cancelled
    gateway → D   Decode             D → gateway   Timings, Tokens, StepTokens …, Tokens (the last),
                                                   Finished | Failed | Cancelled
                    the worker that computes the prompt → gateway   PromptLogprobs …, if asked, before any Tokens
    D → P         Attach, Settle, Detach
    P → D         BlocksReady …, PrefillDone, Settled | OfferWithdrawn

A prefill worker that lacks a prefix pulls it, as a sink, from a worker that has it, under a request id of its own:

    P → any       AttachPrefix, Settle, Detach
    any → P       BlocksReady, Settled | OfferWithdrawn

They are declared by who sends them: `gateway`, `worker`, `handoff` (sinks and sources), `session` (all of them);
`fields` has what they are made of, and `common.contract.codec.MESSAGES` lists them.

Lists of token ids, of block ids and of names travel as bytes (`packed`).
A message about a request carries (request, attempt); its frame carries the sender's incarnation (see `codec`); tokens
and blocks carry their position. Messages never carry points in time, since clocks differ; they carry durations (a
time budget, the time that a stage took).
"""
