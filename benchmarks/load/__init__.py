"""`baton bench`: load on any OpenAI-compatible endpoint, and what came of it.

Life of a run:

1. `settings`: what was asked for, validated. `endpoint`: is somebody there, and which model?
2. `plan`: arrival times (`arrivals`), lengths (`lengths`), prompts (`prompts`, `trace`), all drawn from the seed alone.
3. `encode`: every request's body, as bytes, before the first one is sent.
4. `runner`: sends each conversation at its time, whatever became of those before it (open loop), or, under a cap, as
   soon as there is room. `client`: one request; `sse`, `chunk`: what its stream carries, stamped when the bytes arrive.
5. `record`: what is kept of a request: times and counts. `summary`: every figure, from the records alone, so that a
   file with a timeline yields the same figures again.
6. `results`, `tables`, `plots`: the file, the terminal, the pictures. `sweep`: runs at many rates.

It knows nothing of the product beyond the exit codes and the signals of its processes: it measures peers just as well.
"""
